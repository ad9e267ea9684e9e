//! `hotcell_tests::fuzz::targets`: blackbox.

#![no_main]

hotcell_fuzz::target!("blackbox");
