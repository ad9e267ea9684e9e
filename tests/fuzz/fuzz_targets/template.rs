//! `hotcell_tests::fuzz::targets`: template.

#![no_main]

hotcell_fuzz::target!("template");
