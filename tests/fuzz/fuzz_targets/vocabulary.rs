//! `hotcell_tests::fuzz::targets`: vocabulary.

#![no_main]

hotcell_fuzz::target!("vocabulary");
