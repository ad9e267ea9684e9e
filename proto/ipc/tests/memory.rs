//! Sealed memory stays as it is, and a mapping notices when its file does not.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::time::Duration;

use hotcell_ipc::memory::{
    FileIdentity, Mapping, is_fixed_size, is_immutable, sealed_memory, shared_memory,
};
use rustix::fs::SealFlags;

#[test]
fn sealed_memory_cannot_be_written_resized_or_unsealed() {
    let fd = sealed_memory("weights", b"0123456789").unwrap();
    assert!(is_immutable(&fd).unwrap());
    let mut file = File::from(fd);
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "0123456789", "the offset is at the start");

    assert!(file.set_len(3).is_err());
    assert!(file.set_len(100).is_err());
    file.seek(SeekFrom::Start(0)).unwrap();
    assert!(file.write(b"x").is_err());
    assert!(rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).is_err());
    // SAFETY: never touched.
    assert!(unsafe { memmap2::MmapMut::map_mut(&file) }.is_err());
    // Not even through a fresh open of it.
    if let Ok(mut again) = File::options()
        .write(true)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
    {
        assert!(again.write(b"x").is_err());
    }
    assert_eq!(&Mapping::of_file(&file).unwrap()[..], b"0123456789");
}

#[test]
fn shared_memory_can_be_written_but_not_resized() {
    let fd = shared_memory("page", 4096).unwrap();
    assert!(is_fixed_size(&fd).unwrap());
    assert!(!is_immutable(&fd).unwrap());
    let mut file = File::from(fd);
    assert!(file.set_len(0).is_err());
    assert!(file.set_len(8192).is_err());
    file.write_all(b"step 1").unwrap();
    assert_eq!(&Mapping::of_file(&file).unwrap()[..8], b"step 1\0\0");
}

#[test]
fn an_ordinary_file_is_neither() {
    let file = tempfile::tempfile().unwrap();
    assert!(!is_immutable(&file).unwrap());
    assert!(!is_fixed_size(&file).unwrap());
}

#[test]
fn bad_names_are_refused() {
    for name in ["nul\0", &"x".repeat(250)] {
        let error = sealed_memory(name, b"").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    }
    sealed_memory(&"x".repeat(249), b"").unwrap();
}

#[test]
fn a_mapping_sees_that_its_file_changed() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"weights").unwrap();
    // Older kernels stamp with a tick's grain.
    std::thread::sleep(Duration::from_millis(20));
    let mapping = Mapping::of_file(&file).unwrap();
    let clone = mapping.clone();
    assert_eq!(mapping.bytes(), b"weights");
    assert_eq!(mapping.identity(), FileIdentity::of(&file).unwrap());
    assert!(mapping.unchanged());

    file.seek(SeekFrom::Start(0)).unwrap();
    file.write_all(b"W").unwrap();
    assert!(!mapping.unchanged(), "same size, later time");

    let mapping = Mapping::of_file(&file).unwrap();
    assert!(mapping.unchanged());
    std::thread::sleep(Duration::from_millis(20));
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    file.set_permissions(mode).unwrap();
    assert_ne!(mapping.identity(), FileIdentity::of(&file).unwrap());
    assert!(mapping.unchanged(), "the bytes are the same");
    file.set_len(1000).unwrap();
    assert!(!mapping.unchanged());
    assert!(!clone.unchanged());
    assert_eq!(mapping.len(), 7, "no more than was mapped");
}

#[test]
fn a_mapping_outlives_the_descriptor_and_crosses_threads() {
    let fd = sealed_memory("m", b"abc").unwrap();
    let mapping = Mapping::of_file(&fd).unwrap();
    drop(fd);
    let other = mapping.clone();
    let read = std::thread::spawn(move || other.to_vec()).join().unwrap();
    assert_eq!(read, b"abc");
    assert!(mapping.unchanged());
}

#[test]
fn an_empty_file_maps_to_nothing_and_a_directory_not_at_all() {
    let empty = Mapping::of_file(tempfile::tempfile().unwrap()).unwrap();
    assert!(empty.is_empty());
    let directory = File::open("/").unwrap();
    let error = Mapping::of_file(&directory).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn memory_is_filled_then_sealed_and_only_read_from_then_on() {
    use std::os::unix::fs::FileExt;

    let file = hotcell_ipc::memory::unsealed_memory("packed", 10_000).unwrap();
    file.write_all_at(b"end", 9_997).unwrap();
    {
        // SAFETY: never touched.
        let _map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
        assert!(hotcell_ipc::memory::seal(&file).is_err());
    }
    let sealed = hotcell_ipc::memory::seal(&file).unwrap();
    assert!(is_immutable(&sealed).unwrap());
    assert!(file.write_at(b"x", 0).is_err());
    assert!(File::from(sealed.try_clone().unwrap()).set_len(1).is_err());
    let mapping = Mapping::of_file(&sealed).unwrap();
    assert_eq!(&mapping[9_996..], b"\0end");
}

#[test]
fn forgotten_pages_come_back_as_they_were() {
    let mut file = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..400_000u32).map(|i| i as u8).collect();
    file.write_all(&bytes).unwrap();
    let mapping = Mapping::of_file(&file).unwrap();
    assert_eq!(&mapping[..], bytes);
    for range in [0..400_000, 50_000..150_000, 5..6, 399_999..400_000, 7..7] {
        mapping.forget(range).unwrap();
        assert_eq!(&mapping[..], bytes);
    }
    let backwards = std::ops::Range { start: 9, end: 3 };
    for range in [0..400_001, backwards] {
        assert!(mapping.forget(range).is_err());
    }
}
