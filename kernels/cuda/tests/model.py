#!/usr/bin/env python3
"""Tests of the model of the kernels (../model.py). They need no compiler."""
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import model  # noqa: E402
from model import ATTAINABLE, PEAK, Model, makespan, moved, occupancy, together  # noqa: E402

# What the compiler once found; the tests do not depend on its being so still.
NEEDS = {
    "baton_attention_decode_bf16_128": {"registers": 167, "shared": 19456, "dynamic": 0, "threads": 128},
    "baton_attention_hopper_bf16_128": {"registers": 168, "shared": 0, "dynamic": 164864, "threads": 384},
    "baton_attention_hopper_bf16_64": {"registers": 168, "shared": 0, "dynamic": 148480, "threads": 384},
    "baton_sample": {"registers": 128, "shared": 33736, "dynamic": 0, "threads": 512},
}
OF = Model(NEEDS)


class OccupancyTest(unittest.TestCase):
    def test_each_limit_binds(self):
        for needs, blocks, warps, limit in [
            ((32, 0, 256), 8, 64, "registers and warps"),
            ((33, 0, 256), 6, 48, "registers"),  # 40 registers are allocated: 48 warps
            ((255, 0, 128), 2, 8, "registers"),
            ((16, 0, 1024), 2, 64, "warps"),
            ((16, 0, 32), 32, 32, "blocks"),
            ((16, 100 << 10, 128), 2, 8, "shared memory"),
            ((16, 227 << 10, 128), 1, 4, "shared memory"),
            # 1 KiB of each block is the device's own.
            ((16, 113 << 10, 128), 2, 8, "shared memory"),
            ((16, (113 << 10) + 1, 128), 1, 4, "shared memory"),
            # Warps get registers in fours: 13 would fit.
            ((153, 0, 32), 12, 12, "registers"),
        ]:
            with self.subTest(needs):
                of = occupancy(*needs)
                self.assertEqual((of.blocks, of.warps, of.limit), (blocks, warps, limit))

    def test_what_does_not_fit_is_refused(self):
        for needs in [(16, (227 << 10) + 1, 128), (256, 0, 128)]:
            with self.assertRaises(ValueError):
                occupancy(*needs)


class TimesTest(unittest.TestCase):
    def test_jobs_are_taken_as_places_become_free(self):
        self.assertEqual(makespan([3, 1, 1, 1], 2), 3)
        self.assertEqual(makespan([1, 1, 1, 3], 2), 4)
        self.assertEqual(makespan([5], 8), 5)

    def test_those_that_read_side_by_side_share_what_there_is(self):
        self.assertEqual(together([1, 1], 10, memory=10, flight=8), 2)
        # The second alone goes on as fast as its loads allow.
        self.assertEqual(together([1, 2], 10, memory=10, flight=8), 2 + 10 / 8)
        self.assertEqual(together([0, 3], 10, memory=10, flight=20), 3)

    def test_decode_attention_of_many_rows_is_its_bytes_and_of_few_its_loads(self):
        kv = 64 * 8193 * 8 * 128 * 2 * 2
        seconds = OF.decode(PEAK, [8193] * 64)
        self.assertTrue(kv / PEAK.memory < seconds < 1.05 * kv / PEAK.memory)
        one = OF.decode(PEAK, [1024])
        self.assertGreater(one, 1.5 * 1024 * 8 * 128 * 2 * 2 / PEAK.memory)
        # A row alone waits for four turns of K and V at least.
        self.assertGreater(one, 4 * 2 * model.MEMORY_CLOCKS / model.CLOCK)

    def test_decode_attention_of_mixed_lengths_is_that_of_its_positions(self):
        mixed, even = [1025] * 63 + [65537], [2033] * 64
        self.assertEqual(sum(mixed), sum(even))
        self.assertTrue(1 < OF.decode(PEAK, mixed) / OF.decode(PEAK, even) < 1.35)
        # Long rows take time to bring together, short ones none.
        self.assertGreater(OF.decode(PEAK, [65536]) - OF.decode(PEAK, [256] * 256), 30 * model.L2_CLOCKS / model.CLOCK)

    def test_a_row_of_one_split_leaves_no_sums(self):
        sizes = {"rows": 1, "kv_heads": 8, "head_parts": 1, "seen": 256, "head_dim": 128, "kv_t": 2, "parameters": 0, "heads": 32, "q_t": 4, "out_t": 2}
        one = moved("baton_attention_decode_bf16_128", splits=1, **sizes)
        self.assertEqual(one, 256 * 8 * 128 * 2 * 2 + 32 * 128 * (4 + 2) + 12)
        self.assertEqual(moved("baton_attention_decode_bf16_128", splits=2, **sizes), one + 12 + 32 * 2 * 130 * 4)

    def test_prefill_is_bound_by_products_and_a_little_more_than_its_operations(self):
        pairs = 8192 * 8193 // 2
        least = 4 * 32 * 128 * pairs / PEAK.bf16
        self.assertTrue(least < OF.hopper(PEAK, 8192) < 1.05 * least)
        # With endless products L2 would be the bound, a little later than the exponentials.
        for rates in (PEAK, ATTAINABLE):
            endless = model.dataclasses.replace(rates, bf16=1e30)
            self.assertTrue(pairs * 32 / (16 * 132 * model.CLOCK) < OF.hopper(endless, 8192) < OF.hopper(rates, 8192))
        self.assertAlmostEqual(OF.hopper(PEAK, 8192, 64) / OF.hopper(PEAK, 8192), 0.5)
        self.assertGreater(OF.warps(PEAK, 8192), 1.9 * least)
        # A prompt that gives SMs less than a thread block each.
        self.assertGreater(OF.hopper(PEAK, 512), 1.9 * 4 * 32 * 128 * 512 * 513 / 2 / PEAK.bf16)

    def test_sampling_takes_as_long_for_64_rows_as_for_one(self):
        for how, (passes, _) in model.SAMPLING.items():
            self.assertEqual(OF.sample(1, how), OF.sample(64, how))
            self.assertGreater(OF.sample(256, how), 0.99 * OF.sample(132, how))
            self.assertGreater(OF.sample(528, how), 1.9 * OF.sample(132, how))
            self.assertGreaterEqual(OF.sample(1, how), 0.9999 * len(passes) * 4 * model.VOCAB / model.L2_PORT / model.CLOCK)
        self.assertEqual([len(passes) for passes, _ in model.SAMPLING.values()], [1, 2, 3, 3])

    def test_a_step_is_never_faster_than_its_floor(self):
        for rates in (PEAK, ATTAINABLE):
            for fp8 in (False, True):
                steps = [OF.step(rates, batch, 1024, fp8) for batch in (1, 8, 64, 256)]
                seconds = [step.seconds() for step in steps]
                self.assertEqual(seconds, sorted(seconds))
                for step in steps:
                    self.assertTrue(1 < step.seconds() / step.floor(rates) < 1.5)

    def test_weights_are_those_of_the_model(self):
        # 8,030,261,248 parameters, of which the embedding and 65 norms of 4,096 are not read in whole or not counted.
        parameters = 8_030_261_248 - model.VOCAB * model.HIDDEN - 65 * model.HIDDEN
        self.assertEqual(model.weight_bytes(False), 2 * parameters)
        self.assertLess(model.weight_bytes(True), 0.6 * model.weight_bytes(False))
        self.assertEqual((model.launches(False), model.launches(True)), (294, 358))

    def test_what_is_measured_is_predicted_by_its_name(self):
        for what, case in [("decode", "64 x 8192 tokens"), ("decode", "3 x 10 + 1 x 600 tokens"), ("prefill", "8192 tokens"), ("prefill", "8192 tokens, head_dim 64"),
                           ("prefill", "8192 tokens, head_dim 64, mma.sync"), ("sample", "64 x 128256 logits, all filters")]:
            self.assertGreater(OF.predicted(what, case), 1e-6, case)
        for what, case in [("memory", "x += y"), ("decode", "64 rows"), ("sample", "1 x 128256 logits, none")]:
            self.assertIsNone(OF.predicted(what, case))


if __name__ == "__main__":
    unittest.main()
