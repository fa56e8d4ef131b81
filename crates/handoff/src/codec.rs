//! Reads and writes little-endian fields, for frames and descriptors. Pure. Every length is checked against the bytes present before it is
//! used.

/// What is wrong with a byte string.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Malformed {
    /// The field that was being read.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: String,
}

impl Malformed {
    /// A problem with `field`.
    pub fn new(field: &'static str, problem: impl Into<String>) -> Malformed {
        Malformed { field, problem: problem.into() }
    }
}

/// Reads fields from the front of a byte string.
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Fields { rest: bytes }
    }

    /// The next `len` bytes.
    pub(crate) fn bytes(&mut self, field: &'static str, len: usize) -> Result<&'a [u8], Malformed> {
        let Some((head, rest)) = self.rest.split_at_checked(len) else {
            return Err(Malformed::new(field, format!("{len} bytes expected, {} left", self.rest.len())));
        };
        self.rest = rest;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(field, N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A byte string after its u32 length.
    pub(crate) fn blob(&mut self, field: &'static str) -> Result<&'a [u8], Malformed> {
        let len = self.u32(field)? as usize;
        self.bytes(field, len)
    }

    /// UTF-8 text after its u32 length.
    pub(crate) fn text(&mut self, field: &'static str) -> Result<String, Malformed> {
        let text = std::str::from_utf8(self.blob(field)?);
        text.map(str::to_owned).map_err(|_| Malformed::new(field, "not UTF-8"))
    }

    /// u32s after their u32 count.
    pub(crate) fn u32s(&mut self, field: &'static str) -> Result<Vec<u32>, Malformed> {
        let (chunks, _) = self.counted(field, 4)?.as_chunks::<4>();
        Ok(chunks.iter().map(|c| u32::from_le_bytes(*c)).collect())
    }

    /// u64s after their u32 count.
    pub(crate) fn u64s(&mut self, field: &'static str) -> Result<Vec<u64>, Malformed> {
        let (chunks, _) = self.counted(field, 8)?.as_chunks::<8>();
        Ok(chunks.iter().map(|c| u64::from_le_bytes(*c)).collect())
    }

    fn counted(&mut self, field: &'static str, size: usize) -> Result<&'a [u8], Malformed> {
        let count = self.u32(field)? as usize;
        let len = count.checked_mul(size).ok_or_else(|| Malformed::new(field, format!("{count} entries")))?;
        self.bytes(field, len)
    }

    /// Ok when nothing is left.
    pub(crate) fn end(self) -> Result<(), Malformed> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(Malformed::new("length", format!("{left} bytes too many"))),
        }
    }
}

/// Appends fields.
pub(crate) trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }
    fn put_u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }
    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
    fn put_blob(&mut self, bytes: &[u8]) {
        self.put_u32(bytes.len() as u32);
        self.put(bytes);
    }
    fn put_u32s(&mut self, values: impl ExactSizeIterator<Item = u32>) {
        self.put_u32(values.len() as u32);
        values.for_each(|v| self.put_u32(v));
    }
    fn put_u64s(&mut self, values: &[u64]) {
        self.put_u32(values.len() as u32);
        values.iter().for_each(|v| self.put_u64(*v));
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}
