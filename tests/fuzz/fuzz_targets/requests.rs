//! `hotcell_tests::fuzz::targets`: requests.

#![no_main]

hotcell_fuzz::target!("requests");
