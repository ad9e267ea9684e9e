//! How functions are declared that C programs call.

/// Functions that count their calls, and fail where they are told to.
macro_rules! entries {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => { $(
        /// As in NVIDIA's header.
        ///
        /// # Safety
        /// As there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let answer = $crate::gate(stringify!($name));
            if answer != $crate::SUCCESS {
                return answer;
            }
            // SAFETY: the caller's.
            #[allow(unused_unsafe)]
            unsafe { $body }
        }
    )* };
}
