//! `hotcell_tests::fuzz::targets`: tokenizer.

#![no_main]

hotcell_fuzz::target!("tokenizer");
