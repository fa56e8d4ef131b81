//! The object tier's names: an object is a block, and its name says all that an index has to know of it.
//!
//! `<layout>-<numerics>-v<version>/<name>-<parent>-<groups>`, in hexadecimal. So a listing is the whole index, and KV of other models, backends
//! and versions lies elsewhere. The object is a head ([`Head`](crate::Head), with [`Place::NOWHERE`](crate::Place::NOWHERE)) and the data.

use std::fmt;
use std::str::FromStr;

use baton_kv_cache::BlockName;

use crate::record::VERSION;
use crate::{Block, BlockKey, Identity, Shape, StoreError};

/// The size of the object tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectConfig {
    /// Most objects.
    pub most: u64,
}

impl ObjectConfig {
    /// As many objects as `bytes` have room for.
    pub fn of_size(bytes: u64, shape: &Shape) -> Result<ObjectConfig, StoreError> {
        match bytes / object_bytes(shape) {
            0 => Err(StoreError::Setting { field: "object size", value: bytes, must: "room for a block or more" }),
            most => Ok(ObjectConfig { most }),
        }
    }
}

/// Bytes of an object.
pub fn object_bytes(shape: &Shape) -> u64 {
    (shape.head_bytes() + shape.data_bytes()) as u64
}

/// The folder of all objects of an identity.
pub fn object_folder(identity: Identity) -> String {
    format!("{:016x}-{:016x}-v{VERSION}", identity.layout, identity.numerics)
}

/// The identity of a folder's objects, of this version; None: the folder is of something else.
pub fn object_identity(folder: &str) -> Option<Identity> {
    let mut fields = folder.split('-');
    let mut next = || u64::from_str_radix(fields.next()?, 16).ok();
    let identity = Identity { layout: next()?, numerics: next()? };
    (object_folder(identity) == folder).then_some(identity)
}

/// An object.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ObjectName {
    /// The block's name.
    pub name: BlockName,
    /// Name of the block before it.
    pub parent: BlockName,
    /// Layer groups whose KV is there, one bit each.
    pub groups: u32,
}

impl ObjectName {
    /// The object of a block.
    pub fn of(block: &Block) -> ObjectName {
        let BlockKey { name, parent, groups, .. } = block.key;
        ObjectName { name, parent, groups }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}-{:032x}-{:x}", self.name.0, self.parent.0, self.groups)
    }
}

impl FromStr for ObjectName {
    type Err = ();

    fn from_str(text: &str) -> Result<ObjectName, ()> {
        let mut fields = text.split('-');
        let mut next = || u128::from_str_radix(fields.next().ok_or(())?, 16).map_err(|_| ());
        let (name, parent) = (BlockName(next()?), BlockName(next()?));
        let read = ObjectName { name, parent, groups: u32::try_from(next()?).map_err(|_| ())? };
        // Nothing else has this name.
        (read.to_string() == text).then_some(read).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{block, shape};

    #[test]
    fn an_objects_name_says_which_block_it_is_and_nothing_else_is_taken_for_one() {
        let object = ObjectName { name: BlockName(0xab), parent: BlockName(u128::MAX), groups: 3 };
        let text = object.to_string();
        assert_eq!(text, "000000000000000000000000000000ab-ffffffffffffffffffffffffffffffff-3");
        assert_eq!(text.parse(), Ok(object));
        for wrong in ["", "ab-cd-3", &text[1..], &format!("{text}-1"), &format!("{text}.tmp")] {
            assert_eq!(wrong.parse::<ObjectName>(), Err(()), "{wrong}");
        }
        let folder = object_folder(Identity { layout: 1, numerics: 0xff });
        assert_eq!(folder, "0000000000000001-00000000000000ff-v1");
        assert_eq!(object_identity(&folder), Some(Identity { layout: 1, numerics: 0xff }));
        for other in ["", "1-ff-v1", "0000000000000001-00000000000000ff-v0", "0000000000000001-00000000000000ff"] {
            assert_eq!(object_identity(other), None, "{other}");
        }
        assert_eq!(ObjectName::of(&block(&shape(), 5)).groups, 0b11);
    }

    #[test]
    fn a_size_without_room_for_a_block_is_refused() {
        let bytes = object_bytes(&shape());
        assert_eq!(ObjectConfig::of_size(3 * bytes - 1, &shape()), Ok(ObjectConfig { most: 2 }));
        assert!(ObjectConfig::of_size(bytes - 1, &shape()).unwrap_err().to_string().contains("object size"));
    }
}
