//! `hotcell_tests::fuzz::targets`: safetensors.

#![no_main]

hotcell_fuzz::target!("safetensors");
