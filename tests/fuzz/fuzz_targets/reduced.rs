//! `hotcell_tests::fuzz::targets`: reduced.

#![no_main]

hotcell_fuzz::target!("reduced");
