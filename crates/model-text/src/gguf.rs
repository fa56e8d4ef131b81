//! The header of a GGUF file: its metadata as keys, and where its tensors are. candle-core parses it; tensor data is never read here.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use serde_json::{Map, Number};

use crate::ModelFileError;
use crate::keys::Keys;

/// Name of the embedding tensor.
pub const EMBEDDING: &str = "token_embd.weight";
/// Name of the output head's tensor, where it is not the embedding.
pub const OUTPUT: &str = "output.weight";
/// Name of the bias of Q in the first layer, where projections have biases.
pub const QUERY_BIAS: &str = "blk.0.attn_q.bias";
/// Arrays up to this long become keys; longer ones belong to the tokenizer.
const KEY_ARRAY: usize = 4096;
/// The first four bytes of every file.
const LETTERS: &[u8; 4] = b"GGUF";

/// Everything in a GGUF file that precedes its tensors.
pub struct Header {
    /// Scalars and short arrays.
    pub keys: Keys,
    /// Tensors by name, as the parser gives them; their extents are not checked.
    pub tensors: HashMap<String, TensorInfo>,
    /// Where in the file tensor data begins.
    pub data_start: u64,
    /// All metadata, including the tokenizer's arrays.
    pub(crate) metadata: HashMap<String, Value>,
}

impl Header {
    /// Reads the header of a file.
    pub fn open(path: &Path) -> Result<Header, ModelFileError> {
        let file = File::open(path).map_err(ModelFileError::io(path))?;
        let size = file.metadata().map_err(ModelFileError::io(path))?.len();
        Header::read(path, &mut BufReader::new(file), size)
    }

    /// Reads the header of a file of `size` bytes. `path` is the file that errors name.
    pub fn read(path: &Path, file: &mut (impl Read + Seek), size: u64) -> Result<Header, ModelFileError> {
        let Content { metadata, tensor_infos, tensor_data_offset, .. } = parse(path, file, size)?;
        let keys = Keys::new(path, scalar_keys(&metadata));
        if keys.or("split.count", 1u32)? > 1 {
            let problem = "the model is split over several GGUF files; merge them into one first";
            return Err(keys.error("split.count", problem));
        }
        Ok(Header { keys, tensors: tensor_infos, data_start: tensor_data_offset, metadata })
    }

    /// Rows of the embedding.
    pub(crate) fn embedding_rows(&self) -> Result<u32, ModelFileError> {
        let wrong = |problem: String| ModelFileError::tensor(self.keys.path(), EMBEDDING, problem);
        let info = self.tensors.get(EMBEDDING).ok_or_else(|| wrong("is missing".to_owned()))?;
        let rows = info.shape.dims().first().copied().unwrap_or(0);
        u32::try_from(rows).map_err(|_| wrong(format!("has {rows} rows, more than any vocabulary")))
    }
}

fn parse(path: &Path, file: &mut (impl Read + Seek), size: u64) -> Result<Content, ModelFileError> {
    let malformed = |reason: &str| ModelFileError::malformed(path, "GGUF", reason);
    let truncated = |what: String| ModelFileError::Truncated { path: path.to_owned(), what, size };
    if size == 0 {
        return Err(truncated("it is empty".to_owned()));
    }
    let mut letters = [0; LETTERS.len()];
    match file.read_exact(&mut letters) {
        Ok(()) if letters == *LETTERS => file.rewind().map_err(ModelFileError::io(path))?,
        Err(e) if e.kind() != ErrorKind::UnexpectedEof => return Err(ModelFileError::io(path)(e)),
        _ => return Err(malformed("it does not begin with the letters GGUF")),
    }
    // The parser checks lengths but divides by the file's own alignment, which may be 0. A hostile file must be an error here (I8).
    let parsed = catch_unwind(AssertUnwindSafe(|| Content::read(file)));
    match parsed {
        Ok(Ok(content)) => Ok(content),
        Ok(Err(e)) => {
            let reason = e.to_string();
            // The parser reports an early end of the file in these two ways, both as text.
            if reason.contains("fill whole buffer") || reason.contains("remaining") {
                Err(truncated(format!("the header is cut off ({})", first_line(&reason))))
            } else {
                Err(malformed(first_line(&reason)))
            }
        }
        Err(_) => Err(malformed("general.alignment is 0")),
    }
}

/// The first line of an error: without the backtrace that candle's errors may carry.
fn first_line(reason: &str) -> &str {
    reason.lines().next().unwrap_or(reason)
}

fn scalar_keys(metadata: &HashMap<String, Value>) -> Map<String, serde_json::Value> {
    metadata.iter().filter_map(|(key, value)| Some((key.clone(), to_json(value)?))).collect()
}

/// A value as JSON; None for long or nested arrays and for numbers JSON lacks (NaN, infinities).
fn to_json(value: &Value) -> Option<serde_json::Value> {
    Some(match value {
        Value::U8(v) => (*v).into(),
        Value::I8(v) => (*v).into(),
        Value::U16(v) => (*v).into(),
        Value::I16(v) => (*v).into(),
        Value::U32(v) => (*v).into(),
        Value::I32(v) => (*v).into(),
        Value::U64(v) => (*v).into(),
        Value::I64(v) => (*v).into(),
        Value::F32(v) => serde_json::Value::Number(Number::from_f64(f64::from(*v))?),
        Value::F64(v) => serde_json::Value::Number(Number::from_f64(*v)?),
        Value::Bool(v) => (*v).into(),
        Value::String(v) => v.clone().into(),
        Value::Array(items) if items.len() <= KEY_ARRAY && !matches!(items.first(), Some(Value::Array(_))) => {
            serde_json::Value::Array(items.iter().map(to_json).collect::<Option<_>>()?)
        }
        Value::Array(_) => return None,
    })
}
