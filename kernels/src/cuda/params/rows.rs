//! Parameters of operations on rows: embedding, norm, quantising, sums and gates.

use super::super::device::{Address, Launch};
use super::{Element, OCTET, Params, by_octets, by_rows, parts};

#[repr(C)]
pub(crate) struct Embed {
    pub table: Address,
    pub rows: Address,
    pub out: Address,
    pub table_type: Element,
    pub out_type: Element,
    pub count: u32,
    pub width: u32,
    pub scale: f32,
    /// Tokens sampled by the step before, for rows whose id is one of them.
    pub drawn: Address,
}

// SAFETY: as in embed.cu.
unsafe impl Params for Embed {
    fn launch(&self) -> Launch {
        Launch::new([self.count, parts(u64::from(self.width / OCTET), 128), 1], [128, 1, 1])
    }
}

/// The kernel's form of [`baton_types::SeededRows`].
#[repr(C)]
pub(crate) struct SeededRows {
    pub out: Address,
    pub key: u64,
    pub first: u64,
    pub stride: u64,
    pub rows: u32,
    pub width: u32,
    pub middle: f32,
    pub spread: f32,
}

// SAFETY: as in seeded_rows.cu.
unsafe impl Params for SeededRows {
    fn launch(&self) -> Launch {
        by_octets(u64::from(self.rows) * u64::from(self.width / OCTET))
    }
}

#[repr(C)]
pub(crate) struct RmsNorm {
    pub x: Address,
    pub add: Address,
    pub weight: Address,
    pub out: Address,
    /// If not null, `out` is E4M3 with these scales.
    pub scales: Address,
    pub x_type: Element,
    pub y_type: Element,
    pub rows: u32,
    pub width: u32,
    pub together: u32,
    pub x_stride: u32,
    pub out_stride: u32,
    pub eps: f32,
}

// SAFETY: as in rms_norm.cu.
unsafe impl Params for RmsNorm {
    fn launch(&self) -> Launch {
        by_rows(self.rows, self.width)
    }
}

#[repr(C)]
pub(crate) struct QuantiseRows {
    pub x: Address,
    pub out: Address,
    pub scales: Address,
    pub x_type: Element,
    pub rows: u32,
    pub width: u32,
    pub x_stride: u32,
}

// SAFETY: as in quantise_rows.cu.
unsafe impl Params for QuantiseRows {
    fn launch(&self) -> Launch {
        by_rows(self.rows, self.width)
    }
}

#[repr(C)]
pub(crate) struct ScaleProducts {
    pub x: Address,
    pub row_scales: Address,
    pub column_scales: Address,
    pub bias: Address,
    pub rows: u32,
    pub width: u32,
    pub stride: u32,
}

// SAFETY: as in scale_products.cu.
unsafe impl Params for ScaleProducts {
    fn launch(&self) -> Launch {
        by_octets(u64::from(self.rows) * u64::from(self.width / OCTET))
    }
}

#[repr(C)]
pub(crate) struct Add {
    pub x: Address,
    pub y: Address,
    pub elements: u64,
    pub x_type: Element,
    pub y_type: Element,
}

// SAFETY: as in add.cu.
unsafe impl Params for Add {
    fn launch(&self) -> Launch {
        by_octets(self.elements / u64::from(OCTET))
    }
}

#[repr(C)]
pub(crate) struct GateMul {
    pub gate: Address,
    pub up: Address,
    pub out: Address,
    pub element: Element,
    pub out_type: Element,
    pub act: u32,
    pub rows: u32,
    pub width: u32,
    pub gate_stride: u32,
    pub up_stride: u32,
    pub out_stride: u32,
}

// SAFETY: as in gate_mul.cu.
unsafe impl Params for GateMul {
    fn launch(&self) -> Launch {
        by_octets(u64::from(self.rows) * u64::from(self.width / OCTET))
    }
}
