//! baton-model-files
