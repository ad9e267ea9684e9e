//! `hotcell_tests::fuzz::targets`: calls.

#![no_main]

hotcell_fuzz::target!("calls");
