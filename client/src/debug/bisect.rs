//! The first of many tokens at which two sides differ, by looking at a few of them.

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bisected {
    /// The first token that differs; none if the last one does not.
    pub first: Option<u64>,
    /// Tokens that were looked at.
    pub looks: u32,
}

/// Finds it among the tokens from `from` to before `to`. What differs at one token goes on in all after it, through the
/// cache; if it does not, a token that differs and whose predecessor does not is found, which need not be the first.
///
/// # Errors
/// Those of `differs`.
pub async fn bisect<E>(
    from: u64,
    to: u64,
    mut differs: impl AsyncFnMut(u64) -> Result<bool, E>,
) -> Result<Bisected, E> {
    let mut looks = 0;
    let Some(last) = to.checked_sub(1).filter(|last| *last >= from) else {
        return Ok(Bisected { first: None, looks });
    };
    looks += 1;
    if !differs(last).await? {
        return Ok(Bisected { first: None, looks });
    }
    // All before `good` are equal, as far as was looked; `bad` differs.
    let (mut good, mut bad) = (from, last);
    while good < bad {
        let middle = good + (bad - good) / 2;
        looks += 1;
        match differs(middle).await? {
            true => bad = middle,
            false => good = middle + 1,
        }
    }
    Ok(Bisected {
        first: Some(bad),
        looks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_is_found_in_as_many_looks_as_its_number_has_bits() {
        for first in 0..100 {
            let found = bisect(0, 100, async |at| Ok::<_, ()>(at >= first)).await;
            let found = found.unwrap();
            assert_eq!(found.first, Some(first));
            assert!(found.looks <= 8, "{found:?}");
        }
        let none = bisect(3, 100, async |_| Ok::<_, ()>(false)).await.unwrap();
        assert_eq!((none.first, none.looks), (None, 1));
        assert_eq!(bisect(3, 3, async |_| Err(())).await.unwrap().looks, 0);
        assert!(bisect(0, 5, async |_| Err::<bool, _>(())).await.is_err());
    }
}
