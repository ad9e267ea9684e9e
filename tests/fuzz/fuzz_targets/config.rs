//! `hotcell_tests::fuzz::targets`: config.

#![no_main]

hotcell_fuzz::target!("config");
