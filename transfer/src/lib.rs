//! baton-transfer
