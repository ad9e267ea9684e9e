//! `hotcell_tests::fuzz::targets`: gguf.

#![no_main]

hotcell_fuzz::target!("gguf");
