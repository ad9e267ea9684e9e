//! `hotcell_tests::fuzz::targets`: capture.

#![no_main]

hotcell_fuzz::target!("capture");
