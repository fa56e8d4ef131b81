//! What the driving end asks of the receiving end, one line for each request. `fuzz` compiles this file too.

use std::fmt;

use baton_handoff::{encode_layout, parse_layout};
use baton_types::{KvGroup, PoolGeometry, hex};

/// Most bytes of a pool that a driving end may ask for (I5).
const MOST: f64 = (64u64 << 30) as f64;

/// One request.
#[derive(Clone, PartialEq, Debug)]
pub enum Request {
    /// `pool LAYOUT COUNTS SEED`, the first request: make a pool of this shape and lend its blocks in the order of the seed. Seed `-`: in
    /// ascending order.
    Pool(PoolGeometry, Option<u64>),
    /// `reserve BLOCKS verified|unverified`: a target for that many blocks of each group.
    Reserve {
        /// Number of blocks.
        blocks: usize,
        /// Whether arriving blocks are compared with their digests.
        verified: bool,
    },
    /// `plain BYTES`: this many bytes follow over the same connection.
    Plain {
        /// Number of bytes.
        bytes: usize,
    },
}

impl Request {
    /// Parses a line, given without its line end.
    ///
    /// # Errors
    /// When it is not a request, or asks for a larger pool than is allowed.
    pub fn parse(line: &str) -> Result<Request, String> {
        let number = |text: &str| text.parse::<usize>().map_err(|_| unknown(line));
        let reserve = |blocks, verified| Ok(Request::Reserve { blocks: number(blocks)?, verified });
        match &*line.split(' ').collect::<Vec<_>>() {
            ["pool", layout, counts, seed] => pool(layout, counts, seed).ok_or_else(|| unknown(line))?,
            ["reserve", blocks, "verified"] => reserve(blocks, true),
            ["reserve", blocks, "unverified"] => reserve(blocks, false),
            ["plain", bytes] => Ok(Request::Plain { bytes: number(bytes)? }),
            _ => Err(unknown(line)),
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Pool(geometry, seed) => {
                let counts: Vec<String> = geometry.blocks.iter().map(u32::to_string).collect();
                let layout = hex::encode(&encode_layout(&geometry.layout));
                let seed = seed.map_or("-".to_owned(), |seed| seed.to_string());
                write!(f, "pool {layout} {} {seed}", counts.join(","))
            }
            Request::Reserve { blocks, verified: true } => write!(f, "reserve {blocks} verified"),
            Request::Reserve { blocks, verified: false } => write!(f, "reserve {blocks} unverified"),
            Request::Plain { bytes } => write!(f, "plain {bytes}"),
        }
    }
}

/// The error for a line that is not understood.
pub(super) fn unknown(line: &str) -> String {
    let said: String = line.chars().take(40).collect();
    format!("the line {said:?} is none of this program's; both ends must be the same version")
}

/// Parses a pool request. None when it does not describe a pool.
fn pool(layout: &str, counts: &str, seed: &str) -> Option<Result<Request, String>> {
    let layout = parse_layout(&hex::decode(layout)?).ok()?;
    let blocks: Vec<u32> = counts.split(',').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let seed = if seed == "-" { None } else { Some(seed.parse().ok()?) };
    if blocks.len() != layout.groups.len() {
        return None;
    }
    // I8: an upper bound that cannot overflow. Exact integer arithmetic is safe for whatever it admits, even in the intermediate steps of
    // a product of 0.
    let most = |(group, blocks): (&KvGroup, &u32)| {
        let row = 4.0 * f64::from(group.head_dim) + 64.0;
        let rows = [group.planes, group.kv_heads, layout.block_size, *blocks].into_iter().map(|n| f64::from(n.max(1)));
        rows.product::<f64>() * row * group.layers.len().max(1) as f64
    };
    let bytes: f64 = layout.groups.iter().zip(&blocks).map(most).sum();
    if bytes > MOST {
        return Some(Err(format!("a pool of about {bytes:.1e} bytes, more than {MOST:.1e}; ask for a smaller one")));
    }
    Some(Ok(Request::Pool(PoolGeometry { layout, blocks }, seed)))
}

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvLayout};

    use super::*;

    #[test]
    fn a_pool_of_no_blocks_is_no_way_around_the_limit() {
        let group =
            KvGroup { layers: vec![0], planes: 2, kv_heads: 1 << 31, head_dim: 1 << 31, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F32, block_size: 1 << 31, groups: vec![group] };
        for blocks in [0, 1] {
            let line = Request::Pool(PoolGeometry { layout: layout.clone(), blocks: vec![blocks] }, None).to_string();
            let error = Request::parse(&line).unwrap_err();
            assert!(error.contains("ask for a smaller one"), "{error}");
        }
    }
}
