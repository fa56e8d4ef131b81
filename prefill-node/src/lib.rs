//! baton-prefill-node
