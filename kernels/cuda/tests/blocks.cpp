// Copies and digests of KV blocks.
#include "copy_blocks.cu"
#include "move_runs.cu"

#include "harness.hpp"

namespace test {

static std::vector<u8> noise(u64 bytes, Random& random) {
    std::vector<u8> out(bytes);
    for (u8& byte : out) byte = static_cast<u8>(random.next());
    return out;
}

TEST(blocks_are_copied_in_all_layers_and_nothing_else_is) {
    Random random{5};
    for (u64 bytes : {16ull, 1056ull, 16400ull, 65536ull}) {
        u32 blocks = 5, layers = 3;
        u64 layer = blocks * bytes;
        std::vector<u8> pool = noise(layers * layer, random), want = pool;
        std::vector<uint2> pairs = {{4, 0}, {1, 3}};
        for (u32 l = 0; l < layers; l++) {
            for (uint2 pair : pairs) std::memcpy(&want[l * layer + pair.y * bytes], &pool[l * layer + pair.x * bytes], bytes);
        }
        run(baton_copy_blocks, CopyBlocks{pool.data(), layer, pairs.data(), bytes, 2, layers});
        CHECK(pool == want, "blocks of %llu bytes", bytes);
        run(baton_copy_blocks, CopyBlocks{pool.data(), layer, pairs.data(), bytes, 0, layers});
        CHECK(pool == want, "an empty list copied something");
    }
}

// As crates/types/src/digest.rs says it, lane by lane.
static u64 digest(const u8* bytes, u64 count, u64 first_lane) {
    u64 sum = 0;
    for (u64 i = 0; i < count / 8; i++) {
        u64 value = 0;
        for (int b = 7; b >= 0; b--) value = value << 8 | bytes[i * 8 + b];
        u64 x = value ^ ((first_lane + i + 1) * 0x9e3779b97f4a7c15ull);
        sum += (x & 0xffffffff) * (x >> 32) + (x << 32 | x >> 32);
    }
    return sum;
}

TEST(digests_are_those_of_the_cpu) {
    // Pinned in crates/types/src/digest.rs.
    std::vector<u8> zeros(8);
    std::vector<u64> one(1);
    std::vector<Moved> run_0 = {{0, 0, 0}};
    run(baton_move_runs, MoveRuns{zeros.data(), nullptr, run_0.data(), one.data(), 8, 1});
    CHECK(one[0] == 0xcdf60a316e3411e6ull, "%llx", one[0]);
    // A short last lane is padded with zeros, and lanes are numbered from 7.
    std::vector<u8> nine = {1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0};
    u64 pinned = digest(nine.data(), 16, 7);
    CHECK(pinned == 0xb46a82c6cd768fd5ull, "the test's own digest is %llx", pinned);
}

TEST(runs_are_moved_and_digested) {
    Random random{9};
    // One lane; not whole parts of a thread block; several of them.
    for (u64 bytes : {8ull, 528ull, 16384ull, 16392ull, 40960ull}) {
        std::vector<u8> source = noise(5 * bytes, random), target = noise(4 * bytes, random), want = target;
        std::vector<Moved> runs = {{3 * bytes, 0, 7}, {0, 2 * bytes, 1ull << 40}, {4 * bytes, 3 * bytes, 0}};
        std::vector<u64> digests(3), sums(3);
        for (u32 i = 0; i < 3; i++) {
            std::memcpy(&want[runs[i].target], &source[runs[i].source], bytes);
            sums[i] = digest(&source[runs[i].source], bytes, runs[i].lane);
        }
        std::vector<u8> before = target;
        run(baton_move_runs, MoveRuns{source.data(), nullptr, runs.data(), digests.data(), bytes, 3});
        CHECK(digests == sums, "%llu bytes, digested only", bytes); // I2
        CHECK(target == before, "digests write nothing");
        // What is there is added to.
        run(baton_move_runs, MoveRuns{source.data(), target.data(), runs.data(), digests.data(), bytes, 3});
        for (u64& sum : sums) sum *= 2;
        CHECK(digests == sums, "%llu bytes, digested on the way", bytes);
        CHECK(target == want, "%llu bytes", bytes);
        target = before;
        run(baton_move_runs, MoveRuns{source.data(), target.data(), runs.data(), nullptr, bytes, 3});
        CHECK(target == want, "%llu bytes, not digested", bytes);
        run(baton_move_runs, MoveRuns{source.data(), target.data(), runs.data(), nullptr, bytes, 0});
    }
}

} // namespace test
