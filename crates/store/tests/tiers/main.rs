//! The store over real files, and over disks that fail.
#![allow(clippy::unwrap_used, reason = "tests")]

mod bucket;
mod common;
mod disks;
mod faulty;
mod files;
mod folder;
mod killed;
mod objects;
mod sharing;
mod unusable;
