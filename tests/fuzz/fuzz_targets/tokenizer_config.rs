//! `hotcell_tests::fuzz::targets`: tokenizer_config.

#![no_main]

hotcell_fuzz::target!("tokenizer_config");
