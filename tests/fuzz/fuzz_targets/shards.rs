//! `hotcell_tests::fuzz::targets`: shards.

#![no_main]

hotcell_fuzz::target!("shards");
