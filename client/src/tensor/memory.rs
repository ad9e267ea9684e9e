//! A session's memory: counters and limits.

use hotcell_proto::{error::Error, v1};

use super::{recover::again, session::Session};

/// Memory of a session, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Tensors, caches and plans now.
    pub active: u64,
    /// The most since the last reset.
    pub peak: u64,
    /// Freed, kept for the session's next tensors.
    pub cache: u64,
    /// What it may hold.
    pub limit: u64,
    /// What it may keep when freed.
    pub cache_limit: u64,
    /// Tensors and caches.
    pub tensors: u32,
    /// Plans.
    pub plans: u32,
}

impl Session {
    async fn memory_call(&self, request: v1::MemoryRequest) -> Result<Memory, Error> {
        let m = again!(self, at => async {
            at.flush().await?;
            at.answer(at.rpc().memory(at.request(request)).await)
        })?;
        if let Some(recovering) = self.recovering() {
            recovering.limited(&request);
        }
        Ok(Memory {
            active: m.active,
            peak: m.peak,
            cache: m.cache,
            limit: m.memory_limit,
            cache_limit: m.cache_limit,
            tensors: m.tensors,
            plans: m.plans,
        })
    }

    /// Memory now.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn memory(&self) -> Result<Memory, Error> {
        self.memory_call(v1::MemoryRequest::default()).await
    }

    /// Sets what the session may hold; returns the previous limit.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn set_memory_limit(&self, bytes: u64) -> Result<u64, Error> {
        let request = v1::MemoryRequest {
            memory_limit: Some(bytes),
            ..Default::default()
        };
        Ok(self.memory_call(request).await?.limit)
    }

    /// Sets how many freed bytes may be kept; returns the previous limit.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn set_cache_limit(&self, bytes: u64) -> Result<u64, Error> {
        let request = v1::MemoryRequest {
            cache_limit: Some(bytes),
            ..Default::default()
        };
        Ok(self.memory_call(request).await?.cache_limit)
    }

    /// Starts measuring the peak anew; returns the previous one.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn reset_peak_memory(&self) -> Result<u64, Error> {
        let request = v1::MemoryRequest {
            reset_peak: true,
            ..Default::default()
        };
        Ok(self.memory_call(request).await?.peak)
    }

    /// Gives freed memory that is kept back to the system.
    ///
    /// # Errors
    /// When the session is gone.
    pub async fn clear_cache(&self) -> Result<(), Error> {
        let request = v1::MemoryRequest {
            clear_cache: true,
            ..Default::default()
        };
        self.memory_call(request).await.map(|_| ())
    }
}
