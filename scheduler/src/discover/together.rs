//! Devices that one worker computes with, each with its part of every model.

use hotcell_proto::v1::Device;

use crate::config::WorkerConfig;

/// Backends of which each member has a device of its own; the processor is one that all have.
const APART: &[&str] = &["cuda"];

/// The number in a device's id.
fn number(device: &Device) -> Option<usize> {
    device.id.rsplit_once(':')?.1.parse().ok()
}

/// Puts devices into groups of as many as compute a model together: those whose numbers follow one another, for a worker takes
/// them by these, and whose kernels are the same, for it has one numerics class. The first of a group has the others as its members; one that is in no group has a problem.
pub(super) fn arranged(mut devices: Vec<Device>, worker: &WorkerConfig) -> Vec<Device> {
    let (flag, count) = match worker.pipeline_parallel {
        1 => ("tensor_parallel", worker.tensor_parallel),
        stages => ("pipeline_parallel", stages),
    };
    if count < 2 {
        return devices;
    }
    let is_one = |d: &Device| d.problem.is_empty() && APART.contains(&d.backend.as_str());
    let mut open: Vec<usize> = Vec::new();
    let mut left: Vec<usize> = Vec::new();
    for at in 0..devices.len() {
        let Some(device) = devices.get(at).filter(|d| is_one(d)) else {
            continue;
        };
        let follows = open
            .last()
            .and_then(|last| devices.get(*last))
            .is_none_or(|last| {
                last.backend == device.backend
                    && last.path == device.path
                    && number(last).map(|n| n + 1) == number(device)
            });
        if !follows {
            left.append(&mut open);
        }
        open.push(at);
        if open.len() == count {
            let ids = open
                .drain(..)
                .filter_map(|at| Some(devices.get(at)?.id.clone()));
            let ids: Vec<String> = ids.collect();
            let Some((first, members)) = ids.split_first() else {
                continue;
            };
            let first = devices.iter_mut().find(|d| d.id == *first);
            if let Some(first) = first {
                first.members = members.to_vec();
            }
        }
    }
    left.append(&mut open);
    for at in left {
        if let Some(device) = devices.get_mut(at) {
            device.problem = format!(
                "{flag} = {count} takes {count} devices of one architecture whose numbers follow one another, and this one is left over"
            );
        }
    }
    devices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::{tests::worker_of, with_workers};

    fn worker(tensor: usize, pipeline: usize) -> WorkerConfig {
        WorkerConfig {
            tensor_parallel: tensor,
            pipeline_parallel: pipeline,
            ..worker_of("hotcell-worker")
        }
    }

    fn devices(ids: &[&str]) -> Vec<Device> {
        let device = |id: &&str| Device {
            id: (*id).to_owned(),
            backend: id.split(':').next().unwrap_or_default().to_owned(),
            ..Device::default()
        };
        ids.iter().map(device).collect()
    }

    /// Ids of the groups, and of those that are left.
    fn groups(ids: &[&str], config: &WorkerConfig) -> (Vec<Vec<String>>, Vec<String>) {
        let all = arranged(devices(ids), config);
        let group = |d: &Device| [vec![d.id.clone()], d.members.clone()].concat();
        let left = all.iter().filter(|d| !d.problem.is_empty());
        let left = left.map(|d| d.id.clone()).collect();
        (with_workers(&all).map(group).collect(), left)
    }

    #[test]
    fn devices_are_taken_in_the_order_of_their_numbers() {
        let eight: Vec<String> = (0..8).map(|n| format!("cuda:{n}")).collect();
        let eight: Vec<&str> = eight.iter().map(String::as_str).collect();
        for config in [worker(4, 1), worker(1, 4)] {
            let (found, left) = groups(&eight, &config);
            let expected = [&eight[..4], &eight[4..]];
            assert_eq!(found, expected);
            assert!(left.is_empty());
        }
        // One worker each.
        assert_eq!(groups(&eight, &worker(1, 1)).0.len(), 8);
    }

    #[test]
    fn who_is_left_over_has_a_problem_and_the_processor_is_one_for_all() {
        let all = [
            "cpu:0", "cuda:0", "cuda:1", "cuda:3", "cuda:4", "cuda:5", "mlx:0",
        ];
        let (found, left) = groups(&all, &worker(2, 1));
        let expected = [
            vec!["cpu:0"],
            vec!["cuda:0", "cuda:1"],
            vec!["cuda:3", "cuda:4"],
            vec!["mlx:0"],
        ];
        assert_eq!(found, expected);
        assert_eq!(left, ["cuda:5"]);
        let (found, left) = groups(&["cuda:0", "cuda:2"], &worker(2, 1));
        assert_eq!((found.len(), left.len()), (0, 2));
    }
}
