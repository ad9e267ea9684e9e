//! Loading and unloading models.

use hotcell_proto::{
    error::{Error, Reason},
    ids::ModelName,
};
use tokio::sync::mpsc;

use crate::{access::Caller, admission::draining, audit::Who, service::Shared};

/// The model that is meant, if the caller may name it.
fn named(shared: &Shared, caller: &Caller, name: &str) -> Result<ModelName, Error> {
    let name = ModelName::new(name)?;
    if caller.remote {
        shared.fleet.check_remote(&name)?;
    }
    Ok(name)
}

/// Refuses what would change how a model is loaded.
pub(super) fn check_parameters<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<(), Error> {
    // The only one that says what is done anyway: nothing depends on a model.
    let odd = names.into_iter().find(|name| *name != "unload_dependents");
    match odd {
        None => Ok(()),
        Some(name) => {
            let name: String = name.chars().take(80).collect();
            let what = format!(
                "parameter {name:?}: models are loaded as they are configured; load another one with `hotcell load PATH`"
            );
            Err(Error::new(Reason::Unimplemented, what))
        }
    }
}

/// Loads a model that is known.
///
/// # Errors
/// Why it cannot be loaded.
pub(super) async fn load(
    shared: &Shared,
    caller: &Caller,
    who: Who,
    name: &str,
) -> Result<(), Error> {
    if shared.graphs.find(name, caller).is_some() {
        // It is there for as long as it is saved.
        return Ok(());
    }
    let name = named(shared, caller, name)?;
    if shared.admission.is_closed() {
        return Err(draining());
    }
    // Nobody hears how far it is.
    let (progress, _) = mpsc::channel(1);
    tokio::select! {
        loaded = shared.fleet.load_for(who, Some(name), None, progress) => loaded.map(|_| ()),
        () = shared.abort.cancelled() => Err(draining()),
    }
}

/// Has every worker forget a model.
///
/// # Errors
/// [`Reason::ModelNotFound`].
pub(super) async fn unload(
    shared: &Shared,
    caller: &Caller,
    who: &Who,
    name: &str,
) -> Result<(), Error> {
    if shared.graphs.find(name, caller).is_some() {
        let what = format!(
            "{name} is a saved graph, which would be lost; `hotcell graphs forget` forgets it"
        );
        return Err(Error::new(Reason::Unimplemented, what));
    }
    let name = named(shared, caller, name)?;
    shared.fleet.unload_for(who, &name).await
}
