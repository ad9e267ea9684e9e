//! `hotcell_tests::fuzz::targets`: graph.

#![no_main]

hotcell_fuzz::target!("graph");
