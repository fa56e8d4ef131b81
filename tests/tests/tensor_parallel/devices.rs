//! Ranks on a device each, the kernels compiled for the host: their logits are those of the CPU's ranks within what 16-bit weights allow, at
//! one degree not a bit depends on the route (I1), and a rank that fails ends its step, and where devices may be left waiting for each other
//! the worker, but never hangs (I5).

use baton_kernels::cuda::{CudaBackend, CudaOptions, Driver, ExchangingDevice, HostDevice, Recorded, Recorder};
use baton_model::Footprint;
use baton_model::parallel::GpuRanks;
use baton_tests::logits::distance;

use super::*;

/// Largest difference of a logit from the CPU's at the same degree, in standard deviations of its row: as of one device.
const FAR_FROM_THE_CPU: f64 = 0.3;

const OPTIONS: Options = Options {
    kv: KvDtype::Bf16,
    chunk: 20,
    budget: 48,
    max_running: 4,
    blocks: 24,
    threads: 1,
    isa: baton_kernels::Isa::Portable,
    share: false,
    sinks: None,
    context: Some(128),
};

/// Decode rows with the bits that they have as rows of a chunk.
const INVARIANT: CudaOptions = CudaOptions { invariant: true, graphs: true, hopper: true, fp8: false };

type Device = Recorder<HostDevice>;

/// As many; none where there are no kernels for the host.
fn devices(ranks: u32) -> Option<Vec<Arc<Device>>> {
    (0..ranks).map(|_| HostDevice::for_tests().map(|device| Arc::new(Recorder::new(device)))).collect()
}

/// Nothing of a device is used against its rules, and nothing of it left.
fn expect_clean(devices: &[Arc<Device>]) {
    for device in devices {
        assert_eq!((device.problems(), device.live_bytes()), (Vec::new(), 0));
    }
}

fn requests(model: &Model) -> Vec<Request> {
    let vocab = model.config().vocab_size;
    [3, 41, 18].map(|len| greedy((0..len).map(|i| (i * 37 + len * 11) % vocab).collect(), 5)).into()
}

/// A tiny model in a directory that is there as long as it is.
fn opened(name: &str) -> anyhow::Result<(tempfile::TempDir, Model)> {
    let directory = tempfile::tempdir()?;
    tiny::config(name)?.write(directory.path())?;
    let model = Model::open(directory.path())?;
    Ok((directory, model))
}

/// With tied and untied embeddings, biases, norms of heads, windows; each rank takes the memory that was foreseen, and no more in a step.
#[test]
fn ranks_on_devices_give_the_logits_of_the_cpus() -> anyhow::Result<()> {
    for (name, ranks) in [("llama-gqa-odd-vocab", 2), ("llama-mha", 4), ("qwen2", 2), ("gemma3", 2)] {
        let Some(devices) = devices(ranks) else { return Ok(()) };
        let (_directory, model) = opened(name)?;
        let mut gpus = Local::ranks_on(&model, OPTIONS, &devices, CudaOptions::default())?;
        let layout = kv_layout(model.config(), model.fingerprint(), OPTIONS.kv, 16).of_ranks(ranks);
        let limits = DecoderLimits { tokens: OPTIONS.budget as usize, samples: 4, context: 128, table_entries: 0 };
        let footprint = Footprint::of_rank(&model, ranks, &layout, limits, false)?;
        let pool = PoolGeometry::uniform(layout, OPTIONS.blocks).bytes() as u64;
        near_the_cpus(&model, &mut gpus, ranks).context(name)?;
        let mut taken: Vec<u64> = devices.iter().map(|device| device.live_bytes() - pool).collect();
        let known = footprint.weights + footprint.activations;
        taken.sort_unstable();
        ensure!(taken.iter().all(|taken| *taken <= footprint.total()), "{name}: {taken:?}, foreseen: {footprint:?}");
        ensure!(taken.last() >= Some(&known), "{name}: {taken:?}, foreseen: {footprint:?}");
        devices.iter().for_each(|device| drop(device.take_log()));
        run(&mut gpus, &requests(&model))?;
        let allocates =
            |device: &Arc<Device>| device.take_log().iter().any(|call| matches!(call, Recorded::Allocate(_)));
        ensure!(!devices.iter().any(allocates), "{name}: a step allocates");
        drop(gpus);
        expect_clean(&devices);
    }
    Ok(())
}

/// The same over NCCL, where there are two GPUs.
#[test]
fn ranks_on_gpus_give_the_logits_of_the_cpus() -> anyhow::Result<()> {
    let gpus: Vec<_> = match (0..2).map(Driver::open).collect::<Result<Vec<_>, _>>() {
        Ok(gpus) => gpus.into_iter().map(Arc::new).collect(),
        Err(error) => {
            eprintln!("skipped: {error}");
            return Ok(());
        }
    };
    for name in ["llama-gqa-odd-vocab", "qwen2", "gemma3"] {
        let (_directory, model) = opened(name)?;
        near_the_cpus(&model, &mut Local::ranks_on(&model, OPTIONS, &gpus, CudaOptions::default())?, 2)
            .context(name)?;
    }
    Ok(())
}

/// Compares ranks with as many on the CPU, whose answer is gone on with, so that every step is compared.
fn near_the_cpus<B: Backend>(model: &Model, ranks: &mut Local<B>, count: u32) -> anyhow::Result<()> {
    let requests = requests(model);
    let (want, of_cpu) = run(&mut Local::ranks(model, OPTIONS, count)?, &requests)?;
    let mut far = 0f64;
    ranks.run(&requests, &mut |request, index, row| {
        far = far.max(distance(row, &of_cpu[&(request, index)]));
        Some(want[request][index as usize])
    })?;
    println!("{count} ranks: logits within {far:.4} standard deviations");
    ensure!(far < FAR_FROM_THE_CPU, "logits {far} standard deviations apart");
    Ok(())
}

/// Alone, together, cut otherwise, preempted: the same bits, and the same tokens when the device chooses them.
#[test]
fn on_devices_too_the_route_changes_no_bit_at_one_degree() -> anyhow::Result<()> {
    let Some(all) = devices(2) else { return Ok(()) };
    let (_directory, model) = opened("llama-gqa-odd-vocab")?;
    let on = |options| Local::ranks_on(&model, options, &all, INVARIANT);
    let mut alone = (Vec::new(), Logits::new());
    for (place, request) in requests(&model).into_iter().enumerate() {
        let (mut tokens, logits) = run(&mut on(OPTIONS)?, &[request])?;
        alone.0.append(&mut tokens);
        alone.1.extend(logits.into_iter().map(|((_, index), row)| ((place, index), row)));
    }
    for options in [OPTIONS, Options { chunk: 7, budget: 16, ..OPTIONS }, Options { blocks: 5, ..OPTIONS }] {
        ensure!(run(&mut on(options)?, &requests(&model))? == alone, "{options:?}"); // I1
    }
    let (generated, behind) = on(OPTIONS)?.generate(&requests(&model), true)?;
    let ids = |answer: &Vec<TokenOut>| answer.iter().map(|token| token.id).collect::<Vec<_>>();
    ensure!(generated.iter().map(ids).collect::<Vec<_>>() == alone.0, "tokens chosen by the first rank's device");
    ensure!(behind == 0, "ranks exchange within a step, so none is launched behind another");
    expect_clean(&all);
    Ok(())
}

/// The suite every runner passes.
#[test]
fn ranks_on_devices_conform() -> anyhow::Result<()> {
    if devices(1).is_none() {
        return Ok(());
    }
    let (_directory, model) = opened("llama-gqa-odd-vocab")?;
    let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::Bf16, 16);
    let vocab = model.config().vocab_size;
    let mut setup = conformance::Setup { geometry: PoolGeometry::uniform(layout, 1), vocab, answer_tokens: 3 };
    setup.geometry.blocks = vec![setup.blocks(); setup.geometry.layout.groups.len()];
    let limits = DecoderLimits { tokens: 256, samples: 8, context: 128, table_entries: setup.blocks() as usize };
    let make = || {
        let (devices, backends) = backends(&setup.geometry, 2);
        let exchange = ExchangingDevice::connect(&devices).unwrap();
        TensorParallel::on_devices(&model, &setup.geometry.layout, limits, backends, exchange).unwrap()
    };
    ensure!(conformance::check(&setup, make) == Ok(()), "{:?}", conformance::check(&setup, make));
    Ok(())
}

type Backends = (Vec<Arc<Device>>, Vec<CudaBackend<Device>>);

fn backends(geometry: &PoolGeometry, ranks: u32) -> Backends {
    let devices = devices(ranks).unwrap();
    let backend =
        |device: &Arc<Device>| CudaBackend::new(Arc::clone(device), geometry.of_ranks(ranks), INVARIANT).unwrap();
    let backends = devices.iter().map(backend).collect();
    (devices, backends)
}

/// Whichever rank fails: the step fails with its reason and nobody waits for ever (I5). Before anything of the step was exchanged the next
/// one goes on; after that devices may be waiting for each other, so their exchange is ended for good, and the runner says that it is.
#[test]
fn a_rank_that_fails_on_a_device_ends_the_step_for_all() -> anyhow::Result<()> {
    if devices(1).is_none() {
        return Ok(());
    }
    let (_directory, model) = opened("llama-mha")?;
    let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::Bf16, 16);
    let geometry = PoolGeometry::uniform(layout, 4);
    for (fault, culprit, at) in [(Fault::Error, 0, 1), (Fault::Panic, 1, 1), (Fault::Panic, 0, 2), (Fault::Error, 1, 2)]
    {
        let (devices, backends) = backends(&geometry, 2);
        let trigger = Arc::new(AtomicUsize::new(usize::MAX));
        let elements = LIMITS.tokens * model.config().hidden_size as usize;
        let ranks = GpuRanks::new(ExchangingDevice::connect(&devices)?, &backends, elements)?;
        let collectives = ranks.into_iter().enumerate().map(|(rank, inner)| {
            let at = if rank == culprit { Arc::clone(&trigger) } else { Arc::new(AtomicUsize::new(usize::MAX)) };
            Box::new(Faulty { inner, fault, at }) as Box<dyn Collective<CudaBackend<Device>>>
        });
        let backends = backends.into_iter().zip(collectives).collect();
        let mut runner = TensorParallel::load(&model, &geometry.layout, LIMITS, backends)?;
        let mut engine = Engine::new(small(), &geometry)?;
        let want = ask(&mut engine, &mut runner)?;
        ensure!(want.is_ok(), "{want:?}");
        trigger.store(at, Ordering::Relaxed);
        let reason = match fault {
            Fault::Panic => format!("rank {culprit} panicked: a planned panic"),
            Fault::Error => "a planned error".to_owned(),
        };
        let failed = ask(&mut engine, &mut runner)?;
        assert_eq!(failed, Err(SequenceError::Run(RunError(reason))), "{fault:?} on {culprit} at {at}");
        trigger.store(usize::MAX, Ordering::Relaxed);
        match (runner.lost(), at) {
            (None, 1) => assert_eq!(ask(&mut engine, &mut runner)?, want),
            (Some(error), 2) => ensure!(error.0.contains("start the worker again"), "{error}"),
            (lost, _) => anyhow::bail!("{fault:?} on {culprit} at {at}: {lost:?}"),
        }
        drop(runner);
        expect_clean(&devices);
    }
    Ok(())
}
