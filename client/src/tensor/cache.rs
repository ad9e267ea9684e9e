//! Caches on the worker, which steps write and read.

use hotcell_graph::{CacheSpec, Shape, TensorSpec};
use hotcell_proto::{
    error::{Error, Reason},
    session::HandleId,
    v1,
};

use super::{
    array::{State, Tensor, of_graph},
    host::HostTensor,
    recipe::Recipe,
    recover::again,
    session::Session,
};

/// Keys and values of attention on the worker, in blocks: room for `blocks · block_len` tokens, each `[kv_heads, head_dim]` twice,
/// rounded to its dtype. A [`Step`](super::Step) writes and reads it. It is counted in the session's quota and freed with its last
/// clone. What a worker's death takes of it cannot be made again, see [`Recovery`](super::Recovery): write it anew.
#[derive(Clone)]
pub struct Cache(pub(super) Tensor, CacheSpec);

impl Session {
    /// A cache of zeros.
    ///
    /// # Errors
    /// [`Reason::GraphInvalid`] for one that cannot be (of another dtype than [`CacheSpec::DTYPES`], with an axis of 0),
    /// [`Reason::QuotaExceeded`] or [`Reason::OutOfMemory`].
    pub async fn cache(&self, spec: CacheSpec) -> Result<Cache, Error> {
        let remote = again!(self, at => async {
            let id = HandleId::random()?;
            let remote = at.named(id);
            let spec = v1::CacheSpec {
                dtype: spec.dtype.name().to_owned(),
                blocks: spec.blocks as u64,
                block_len: spec.block_len as u64,
                kv_heads: spec.kv_heads as u64,
                head_dim: spec.head_dim as u64,
            };
            let request = at.request(v1::CreateRequest {
                spec: Some(v1::create_request::Spec::Cache(spec)),
                id: id.to_wire(),
            });
            at.answer(at.rpc().create(request).await)?;
            Ok(remote)
        })?;
        let why = "it is a cache, which steps change in place";
        self.note(&remote, |_| Recipe::gone(why));
        Ok(Cache(Tensor::cache(self, spec, remote), spec))
    }
}

impl Cache {
    /// Its dtype and sizes.
    pub fn spec(&self) -> CacheSpec {
        self.1
    }

    /// Its elements as they are now, keys first: `[2, blocks, kv_heads, block_len, head_dim]` of its dtype.
    ///
    /// # Errors
    /// [`Reason::TensorLost`] when it died with its worker, [`Reason::WorkerLost`] and what else ends a session.
    pub async fn fetch(&self) -> Result<HostTensor, Error> {
        let (CacheSpec { dtype, .. }, Some(session)) = (self.1, &self.0.0.session) else {
            return Err(Error::new(Reason::Internal, "a cache without a session"));
        };
        let State::Remote(remote) = self.0.state() else {
            return Err(Error::new(Reason::Internal, "a cache without a handle"));
        };
        let dims = [
            2,
            self.1.blocks,
            self.1.kv_heads,
            self.1.block_len,
            self.1.head_dim,
        ];
        let shape = Shape::fixed(&dims).map_err(|e| of_graph(&e))?;
        let spec = TensorSpec::new(dtype, shape).map_err(|e| of_graph(&e))?;
        session.download(&remote, &spec).await
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cache({})", self.1)
    }
}
