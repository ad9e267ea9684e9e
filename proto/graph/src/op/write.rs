//! How rows are written: the macro [`ops!`] and what it is made of.

/// Declares op rows and their builder methods.
///
/// `name(inputs; attribute: kind, …) -> results { shapes, dtypes, effect, infer, decompose }`. An input is a
/// name, `name = optional` or, the last one, `name = many`; `name = index` and `name = optional_index` are such whose
/// elements say where the op reads or writes. `results` is `one` (the method returns the value),
/// `two` (a pair), `many` (a list) or `none` (an effect only). A row whose name is a word of Rust is written
/// `method as "name"(…)`.
macro_rules! ops {
    ($($(#[doc = $doc:literal])+
       $name:ident $(as $wire:literal)? ( $($input:ident $(= $mode:ident)?),* ; $($attr:ident : $kind:ident $(($($range:expr),+))?),* ) -> $results:ident
       { shapes: $shapes:expr, dtypes: $dtypes:expr, effect: $effect:expr, infer: $infer:path, decompose: $decompose:expr $(,)? })*) => {
        $(
            #[doc(hidden)]
            #[allow(non_upper_case_globals)]
            pub static $name: $crate::op::OpRow = $crate::op::OpRow {
                name: $crate::op::row_name!($name $($wire)?),
                doc: concat!($($doc, "\n"),+),
                inputs: &[$($crate::op::InputSpec {
                    name: stringify!($input),
                    mode: $crate::op::input_mode!($($mode)?),
                    is_index: $crate::op::input_is_index!($($mode)?),
                }),*],
                attributes: &[$($crate::op::AttributeSpec {
                    name: stringify!($attr),
                    kind: $crate::op::AttributeKind::$kind $(($($range),+))?,
                }),*],
                shapes: $shapes,
                dtypes: $dtypes,
                effect: $effect,
                infer: $infer,
                decompose: $decompose,
            };
        )*

        /// The rows of this file.
        pub static ROWS: &[&$crate::op::OpRow] = &[$(&$name),*];

        impl $crate::graph::GraphBuilder {
            $(
                $(#[doc = $doc])+
                ///
                /// # Errors
                /// When the inputs or attributes do not fit; the message names the op.
                #[allow(clippy::too_many_arguments, clippy::vec_init_then_push)]
                pub fn $name(
                    &mut self,
                    $($input: $crate::op::input_type!($($mode)?),)*
                    $($attr: $crate::op::attribute_type!($kind),)*
                ) -> Result<$crate::op::result_type!($results), $crate::graph::GraphError> {
                    #[allow(unused_mut)]
                    let mut inputs: Vec<$crate::graph::Value> = Vec::new();
                    $($crate::op::input_push!(inputs, $input $($mode)?);)*
                    let outputs = self.apply(
                        &$name,
                        inputs,
                        vec![$($crate::op::attribute_value!($kind, $attr)),*],
                    )?;
                    $crate::op::result_value!($results, outputs)
                }
            )*
        }
    };
}

macro_rules! row_name {
    ($method:ident) => {
        stringify!($method)
    };
    ($method:ident $name:literal) => {
        $name
    };
}

macro_rules! input_mode {
    ($(index)?) => {
        $crate::op::InputMode::One
    };
    (optional) => {
        $crate::op::InputMode::Optional
    };
    (optional_index) => {
        $crate::op::InputMode::Optional
    };
    (many) => {
        $crate::op::InputMode::Many
    };
}

macro_rules! input_is_index {
    (index) => {
        true
    };
    (optional_index) => {
        true
    };
    ($($other:ident)?) => {
        false
    };
}

macro_rules! input_type {
    ($(index)?) => {
        $crate::graph::Value
    };
    (optional) => {
        Option<$crate::graph::Value>
    };
    (optional_index) => {
        Option<$crate::graph::Value>
    };
    (many) => {
        &[$crate::graph::Value]
    };
}

macro_rules! input_push {
    ($inputs:ident, $input:ident $(index)?) => {
        $inputs.push($input)
    };
    ($inputs:ident, $input:ident optional) => {
        $inputs.push($input.unwrap_or($crate::graph::Value::Absent))
    };
    ($inputs:ident, $input:ident optional_index) => {
        $inputs.push($input.unwrap_or($crate::graph::Value::Absent))
    };
    ($inputs:ident, $input:ident many) => {
        $inputs.extend_from_slice($input)
    };
}

macro_rules! attribute_type {
    (Int) => {
        i64
    };
    (Float) => {
        f64
    };
    (Bool) => {
        bool
    };
    (Shape) => {
        $crate::shape::Shape
    };
    (DType) => {
        $crate::dtype::DType
    };
    (Ints) => {
        &[i64]
    };
    (Name) => {
        &str
    };
    (Bytes) => {
        &[u8]
    };
}

macro_rules! attribute_value {
    (Ints, $value:ident) => {
        $crate::op::Attribute::Ints($value.to_vec())
    };
    (Name, $value:ident) => {
        $crate::op::Attribute::Name($value.to_owned())
    };
    (Bytes, $value:ident) => {
        $crate::op::Attribute::Bytes($value.to_vec())
    };
    ($kind:ident, $value:ident) => {
        $crate::op::Attribute::$kind($value)
    };
}

macro_rules! result_type {
    (one) => {
        $crate::graph::Value
    };
    (two) => {
        ($crate::graph::Value, $crate::graph::Value)
    };
    (many) => {
        Vec<$crate::graph::Value>
    };
    (none) => {
        ()
    };
}

macro_rules! result_value {
    (one, $outputs:ident) => {
        $outputs
            .first()
            .copied()
            .ok_or($crate::graph::GraphError::NoResult)
    };
    (two, $outputs:ident) => {
        match $outputs.as_slice() {
            &[first, second] => Ok((first, second)),
            _ => Err($crate::graph::GraphError::NoResult),
        }
    };
    (many, $outputs:ident) => {
        Ok($outputs)
    };
    (none, $outputs:ident) => {{
        debug_assert!($outputs.is_empty());
        Ok(())
    }};
}

#[allow(unused_imports)]
pub(crate) use {
    attribute_type, attribute_value, input_is_index, input_mode, input_push, input_type, ops,
    result_type, result_value, row_name,
};
