//! Loads a model's tensors, or one rank's parts of them, onto a backend. Checks every shape against the configuration.

use baton_kernels::{Backend, KernelError, Norm, Product, RowOrder, WeightSource, element};
use baton_model_files::{LayerTensor, Model, ModelConfig, TensorName, TensorRef};

use crate::ModelError;
use crate::parallel::{Part, Sharding, Stored};

/// Weights of one layer. Shapes as in [`LayerTensor`].
pub(crate) struct Layer<B: Backend> {
    pub attn_norm: Norm<B::Buffer>,
    pub q: Linear<B>,
    pub k: Linear<B>,
    pub v: Linear<B>,
    pub attn_output: Linear<B>,
    pub q_norm: Option<Norm<B::Buffer>>,
    pub k_norm: Option<Norm<B::Buffer>>,
    pub post_attn_norm: Option<Norm<B::Buffer>>,
    pub ffn_norm: Norm<B::Buffer>,
    pub gate: Linear<B>,
    pub up: Linear<B>,
    pub down: Linear<B>,
    pub post_ffn_norm: Option<Norm<B::Buffer>>,
}

/// A matrix and its bias.
pub(crate) struct Linear<B: Backend> {
    pub weight: B::Weight,
    pub bias: Option<B::Buffer>,
}

impl<B: Backend> Linear<B> {
    /// Its product with an input.
    pub fn product<'a>(&'a self, out: &'a mut B::Buffer) -> Product<'a, B::Weight, B::Buffer> {
        Product { weight: &self.weight, bias: self.bias.as_ref(), out }
    }
}

/// All weights.
pub(crate) struct Weights<B: Backend> {
    pub embedding: B::Weight,
    pub layers: Vec<Layer<B>>,
    pub output_norm: Norm<B::Buffer>,
    /// The output head, or this rank's rows of it. `None`: the embedding is the output head.
    pub output: Option<B::Weight>,
}

struct Loader<'a, B: Backend> {
    model: &'a Model,
    /// The configuration of the whole model, as the file has its tensors.
    config: &'a ModelConfig,
    sharding: &'a Sharding,
    backend: &'a mut B,
}

/// A matrix of the model, and the part of it that is wanted.
struct Matrix {
    name: TensorName,
    part: Part,
    /// Size of the whole matrix: `rows` outputs, `cols` inputs.
    rows: usize,
    cols: usize,
    /// Whether its rows are outputs of heads that rope rotates.
    rotated: bool,
}

pub(crate) fn load<B: Backend>(model: &Model, sharding: &Sharding, backend: &mut B) -> Result<Weights<B>, ModelError> {
    let config = model.config();
    let mut loader = Loader { model, config, sharding, backend };
    let (vocab, hidden) = (config.vocab_size as usize, config.hidden_size as usize);
    let embedding = loader.table(TensorName::Embedding, sharding.part(TensorName::Embedding), vocab, hidden)?;
    let layers = (0..config.layers).map(|l| loader.layer(l)).collect::<Result<_, _>>()?;
    let output_norm = loader.norm(TensorName::OutputNorm, hidden)?;
    let part = sharding.part(TensorName::Output);
    let output = match config.tied_embeddings {
        true if part == Part::Whole => None,
        true => Some(loader.table(TensorName::Embedding, part, vocab, hidden)?),
        false => Some(loader.table(TensorName::Output, part, vocab, hidden)?),
    };
    Ok(Weights { embedding, layers, output_norm, output })
}

/// Loads one rank's matrices onto a backend, as a decoder does, and drops them. For a backend that keeps something of them.
///
/// # Errors
/// When the model cannot be split over this many ranks, or cannot be loaded.
pub fn pack<B: Backend>(model: &Model, ranks: u32, rank: u32, mut backend: B) -> Result<B, ModelError> {
    let sharding = match ranks {
        1 => Sharding::whole(model.config()),
        _ => Sharding::of(model, ranks, rank)?,
    };
    load(model, &sharding, &mut backend)?;
    Ok(backend)
}

impl<'a, B: Backend> Loader<'a, B> {
    fn layer(&mut self, layer: u32) -> Result<Layer<B>, ModelError> {
        use LayerTensor as T;
        let c = self.config;
        let (hidden, ffn) = (c.hidden_size as usize, c.intermediate_size as usize);
        let (q, kv, head) = (c.q_size() as usize, c.kv_size() as usize, c.head_dim as usize);
        let name = |t| TensorName::Layer(layer, t);
        let matrix = |t, rows, cols, rotated| self.matrix(name(t), rows, cols, rotated);
        let projections =
            [matrix(T::Q, q, hidden, true), matrix(T::K, kv, hidden, true), matrix(T::V, kv, hidden, false)];
        let gates = [matrix(T::Gate, ffn, hidden, false), matrix(T::Up, ffn, hidden, false)];
        let mut projections = self.linears(projections)?;
        for (linear, (bias, rows)) in projections.iter_mut().zip([(T::QBias, q), (T::KBias, kv), (T::VBias, kv)]) {
            linear.bias = self.bias(name(bias), rows)?;
        }
        let (attn_output, [gate, up]) = (self.linear(name(T::AttnOutput), hidden, q)?, self.linears(gates)?);
        let [q, k, v] = projections;
        Ok(Layer {
            attn_norm: self.norm(name(T::AttnNorm), hidden)?,
            q,
            k,
            v,
            attn_output,
            q_norm: self.norm_if(c.qk_norm, name(T::QNorm), head)?,
            k_norm: self.norm_if(c.qk_norm, name(T::KNorm), head)?,
            post_attn_norm: self.norm_if(c.post_norms, name(T::PostAttnNorm), hidden)?,
            ffn_norm: self.norm(name(T::FfnNorm), hidden)?,
            gate,
            up,
            down: self.linear(name(T::Down), hidden, ffn)?,
            post_ffn_norm: self.norm_if(c.post_norms, name(T::PostFfnNorm), hidden)?,
        })
    }

    fn checked(&self, name: TensorName, wanted: &[usize]) -> Result<TensorRef<'a>, ModelError> {
        let tensor = self.model.tensor(name)?;
        if tensor.shape != wanted {
            return Err(ModelError::Shape {
                tensor: format!("{name:?}"),
                found: tensor.shape,
                wanted: wanted.to_vec(),
            });
        }
        Ok(tensor)
    }

    /// Loads the rank's parts of matrices; `make` brings them to the backend.
    fn load<const N: usize>(
        &mut self,
        wanted: [Matrix; N],
        make: impl FnOnce(&mut B, [&WeightSource<'_>; N]) -> Result<[B::Weight; N], KernelError>,
    ) -> Result<[B::Weight; N], ModelError> {
        let head = self.config.head_dim as usize;
        // Maps a row in half-split rope order (pairs i, i + head/2) to its row in a file that interleaves the pairs (2i, 2i + 1). A part
        // has whole heads.
        let order = |row: usize| row / head * head + row % head % (head / 2) * 2 + row % head / (head / 2);
        let tensors: Vec<_> =
            wanted.iter().map(|of| self.checked(of.name, &[of.rows, of.cols])).collect::<Result<_, _>>()?;
        let labels = wanted.each_ref().map(|of| format!("{:?}", of.name));
        let source = |i: usize| {
            let (of, tensor) = (&wanted[i], &tensors[i]);
            let Stored { rows, cols, data } = of.part.of(of.name, tensor)?;
            let interleaved = of.rotated && self.config.interleaved_qk;
            let row_order: Option<RowOrder<'_>> = if interleaved { Some(&order) } else { None };
            Ok(WeightSource { name: &labels[i], dtype: tensor.dtype, rows, cols, data, row_order })
        };
        let sources = (0..N).map(source).collect::<Result<Vec<_>, ModelError>>()?;
        Ok(make(self.backend, std::array::from_fn(|i| &sources[i]))?)
    }

    /// Loads the embedding or the output head. These are never quantised further.
    fn table(&mut self, name: TensorName, part: Part, rows: usize, cols: usize) -> Result<B::Weight, ModelError> {
        let [table] = self.load([Matrix { name, part, rows, cols, rotated: false }], |backend, [source]| {
            Ok([backend.weight(source)?])
        })?;
        Ok(table)
    }

    /// Describes a matrix with `rows` outputs that only products read. `rotated`: its outputs are heads that rope rotates.
    fn matrix(&self, name: TensorName, rows: usize, cols: usize, rotated: bool) -> Matrix {
        Matrix { name, part: self.sharding.part(name), rows, cols, rotated }
    }

    /// Loads the matrices of the products of one input, without biases.
    fn linears<const N: usize>(&mut self, matrices: [Matrix; N]) -> Result<[Linear<B>; N], ModelError> {
        let weights = self.load(matrices, |backend, sources| backend.linears(sources))?;
        Ok(weights.map(|weight| Linear { weight, bias: None }))
    }

    fn linear(&mut self, name: TensorName, rows: usize, cols: usize) -> Result<Linear<B>, ModelError> {
        let [linear] = self.linears([self.matrix(name, rows, cols, false)])?;
        Ok(linear)
    }

    fn bias(&mut self, name: TensorName, rows: usize) -> Result<Option<B::Buffer>, ModelError> {
        match self.config.qkv_bias {
            true => Ok(Some(self.backend.upload(&self.vector(name, rows)?)?)),
            false => Ok(None),
        }
    }

    fn vector(&self, name: TensorName, len: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.checked(name, &[len])?;
        let bytes = tensor.bytes();
        Ok(self.sharding.part(name).outputs(len).map(|i| element(tensor.dtype, &bytes, i)).collect())
    }

    fn norm(&mut self, name: TensorName, width: usize) -> Result<Norm<B::Buffer>, ModelError> {
        let mut weight = self.vector(name, width)?;
        weight.iter_mut().for_each(|w| *w += self.config.norm_weight_offset);
        Ok(Norm { weight: self.backend.upload(&weight)?, eps: self.config.norm_eps })
    }

    fn norm_if(&mut self, wanted: bool, name: TensorName, width: usize) -> Result<Option<Norm<B::Buffer>>, ModelError> {
        if wanted { self.norm(name, width).map(Some) } else { Ok(None) }
    }
}
