//! JSON of a stranger, read no further than its bounds: what is longer is refused where it becomes so, not once it is in
//! memory, where it takes twenty times as much.

use std::{cell::Cell, collections::HashMap, fmt, marker::PhantomData};

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// The most values, those inside others included, and the most bytes of texts in a [`Small`] one.
const SMALL: (usize, usize) = (1 << 14, 1 << 20);

/// A JSON value that is small.
#[derive(Default)]
pub(super) struct Small(pub Value);

impl<'de> Deserialize<'de> for Small {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Small, D::Error> {
        let (values, bytes) = (Cell::new(SMALL.0), Cell::new(SMALL.1));
        let left = Left {
            values: &values,
            bytes: &bytes,
        };
        left.deserialize(deserializer).map(Small)
    }
}

/// What may still come.
#[derive(Clone, Copy)]
struct Left<'a> {
    values: &'a Cell<usize>,
    bytes: &'a Cell<usize>,
}

impl Left<'_> {
    fn text<E: Error>(self, text: &str) -> Result<(), E> {
        let too_much = || E::custom(format_args!("it has more than {} bytes of text", SMALL.1));
        self.bytes.set(
            self.bytes
                .get()
                .checked_sub(text.len())
                .ok_or_else(too_much)?,
        );
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for Left<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let too_many = || D::Error::custom(format_args!("it has more than {} values", SMALL.0));
        self.values
            .set(self.values.get().checked_sub(1).ok_or_else(too_many)?);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Left<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.text(value)?;
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(value) = list.next_element_seed(self)? {
            all.push(value);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            self.text(&key)?;
            all.insert(key, map.next_value_seed(self)?);
        }
        Ok(Value::Object(all))
    }
}

/// A list of at most `MOST`.
pub(super) struct List<T, const MOST: usize>(pub Vec<T>);

impl<T, const MOST: usize> Default for List<T, MOST> {
    fn default() -> Self {
        List(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Items<T, const MOST: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Items<T, MOST> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MOST}")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = list.next_element()? {
                    if all.len() == MOST {
                        return Err(A::Error::invalid_length(MOST + 1, &self));
                    }
                    all.push(item);
                }
                Ok(all)
            }
        }

        let items = Items::<T, MOST>(PhantomData);
        deserializer.deserialize_seq(items).map(List)
    }
}

/// A vocabulary of at most `MOST` tokens.
pub(super) struct Table<const MOST: usize>(pub HashMap<String, u32>);

impl<'de, const MOST: usize> Deserialize<'de> for Table<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<const MOST: usize>;

        impl<'de, const MOST: usize> Visitor<'de> for Entries<MOST> {
            type Value = HashMap<String, u32>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a vocabulary of at most {MOST} tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut all = HashMap::new();
                while let Some((token, id)) = map.next_entry()? {
                    all.insert(token, id);
                    if all.len() > MOST {
                        return Err(A::Error::invalid_length(all.len(), &self));
                    }
                }
                Ok(all)
            }
        }

        deserializer.deserialize_map(Entries::<MOST>).map(Table)
    }
}
