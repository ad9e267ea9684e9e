//! Who holds which bytes of this worker's memory, at one moment.

use std::time::{SystemTime, UNIX_EPOCH};

use hotcell_proto::{
    error::{Error, Reason},
    limits, v1,
};

use crate::host::Host;

/// Handles that are told of each session, unless somebody asks for others.
const HANDLES: usize = 16;

/// The handles of each session that are asked for.
///
/// # Errors
/// [`Reason::LimitExceeded`].
fn checked(handles: u32) -> Result<usize, Error> {
    let most = limits::MAX_TOLD_HANDLES;
    match handles as usize {
        0 => Ok(HANDLES),
        handles if handles <= most => Ok(handles),
        handles => {
            let what = format!("{handles} handles of each session; at most {most} are told");
            Err(Error::new(Reason::LimitExceeded, what))
        }
    }
}

/// The map, with the largest so many handles of each session.
///
/// # Errors
/// [`Reason::LimitExceeded`] for too many, and when the engine has ended or its queue is full.
pub async fn memory(host: &Host, handles: u32) -> Result<v1::MemoryMap, Error> {
    let handles = checked(handles)?;
    let look = host.engine().inside(move |inside| {
        let mut map = v1::MemoryMap::default();
        let mut names: Vec<&String> = inside.models.keys().collect();
        names.sort_unstable();
        for name in names {
            let Some(batch) = inside.models.get(name) else {
                continue;
            };
            map.caches.push(batch.status(name));
            map.uses.extend(batch.memory(name));
        }
        map.uses.extend(inside.tensors.memory());
        (map.sessions, map.further_sessions) = inside.tensors.holdings(handles);
        map
    });
    let mut map = look.await?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    map.time_ms = since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
    let (worker, epoch) = host.identity();
    (map.worker, map.epoch) = (worker, epoch.0);
    let weights = host.weights_in_use();
    map.uses.splice(0..0, weights);
    Ok(map)
}
