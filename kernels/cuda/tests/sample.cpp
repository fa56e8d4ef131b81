// Sampling against a sampler that sorts, written in double; penalties and masks.
#include "adjust_logits.cu"
#include "mask_logits.cu"
#include "sample.cu"

#include "harness.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

namespace test {

static SampleRow greedy() { return {0, 0, 0.0f, 0, 1.0f, 0.0f, NO_LOGPROBS, 0}; }
static SampleRow drawn(u64 seed, u32 index, float temperature = 1.0f, u32 top_k = 0, float top_p = 1.0f, float min_p = 0.0f) {
    return {seed, index, temperature, top_k, top_p, min_p, NO_LOGPROBS, 0};
}

/// Each row of logits by its parameters, the last row first.
static std::vector<Sampled> sample(const std::vector<float>& logits, std::vector<SampleRow> rows, const std::vector<float>* raw = nullptr) {
    for (u32 i = 0; i < rows.size(); i++) rows[i].row = i;
    std::reverse(rows.begin(), rows.end());
    u32 vocab = static_cast<u32>(logits.size() / std::max<size_t>(rows.size(), 1));
    std::vector<Sampled> out(rows.size());
    run(baton_sample, Sample{logits.data(), raw ? raw->data() : logits.data(), rows.data(), out.data(), static_cast<u32>(rows.size()), vocab});
    std::reverse(out.begin(), out.end());
    return out;
}

/// u as crates/model/src/sampler.rs defines it.
static double uniform(u64 seed, u32 index) {
    u64 z = seed + (u64(index) + 1) * 0x9e3779b97f4a7c15ull;
    for (int i = 0; i < 2; i++) {
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
    }
    return static_cast<double>(z >> 11) / 9007199254740992.0;
}

/// The token a sorting sampler takes, or -1 where a boundary is so near that rounding decides.
static i64 reference(const float* logits, u32 vocab, const SampleRow& row) {
    std::vector<std::pair<double, u32>> all;
    for (u32 id = 0; id < vocab; id++) all.push_back({static_cast<double>(logits[id] / row.temperature), id});
    bool filtered = (row.top_k && row.top_k < vocab) || row.top_p < 1.0f || row.min_p > 0.0f;
    double largest = -INFINITY;
    for (auto& c : all) largest = std::max(largest, c.first);
    if (filtered) {
        std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
        if (row.top_k && row.top_k < vocab) all.resize(row.top_k);
    }
    auto weight = [&](auto& c) { return std::exp(c.first - largest); };
    double total = 0;
    for (auto& c : all) total += weight(c);
    if (row.top_p < 1.0f) {
        double mass = 0, share = total * row.top_p;
        for (size_t i = 0; i < all.size(); i++) {
            mass += weight(all[i]);
            if (std::fabs(mass - share) < 1e-6 * total) return -1;
            if (mass >= share) {
                all.resize(i + 1);
                break;
            }
        }
    }
    if (row.min_p > 0.0f) {
        for (auto& c : all) {
            if (std::fabs(weight(c) - row.min_p) < 1e-6) return -1;
        }
        std::erase_if(all, [&](auto& c) { return weight(c) < row.min_p; });
    }
    total = 0;
    for (auto& c : all) total += weight(c);
    double left = uniform(row.seed, row.index) * total;
    for (auto& c : all) {
        left -= weight(c);
        if (std::fabs(left) < 2e-6 * total) return -1;
        if (left < 0) return c.second;
    }
    return -1;
}

static std::vector<float> random_logits(u32 count, Random& random, double spread) {
    std::vector<float> out(count);
    // Of a grid, so that many are equal.
    for (float& x : out) x = static_cast<float>(std::round(random.normal() * spread * 16) / 16);
    return out;
}

TEST(a_place_without_a_row_is_left_as_it_is) {
    std::vector<float> logits = {1, 2, 9, 4, 5, 6, 7, 8};
    std::vector<SampleRow> rows(3, greedy());
    for (u32 i : {0u, 2u}) rows[i].row = NO_ROW;
    std::vector<Sampled> out(3);
    for (Sampled& sampled : out) sampled.id = 77;
    run(baton_sample, Sample{logits.data(), logits.data(), rows.data(), out.data(), 3, 8});
    CHECK(out[0].id == 77 && out[1].id == 2 && out[2].id == 77, "%u, %u, %u", out[0].id, out[1].id, out[2].id);
}

TEST(greedy_takes_the_likeliest_and_the_lowest_of_equals) {
    Random random{17};
    for (u32 vocab : {1u, 31u, 32u, 33u, 511u, 513u, 2003u}) {
        std::vector<float> logits = random_logits(3 * vocab, random, 1.0);
        std::vector<Sampled> out = sample(logits, {greedy(), greedy(), greedy()});
        for (u32 r = 0; r < 3; r++) {
            u32 want = static_cast<u32>(std::max_element(&logits[r * vocab], &logits[r * vocab] + vocab) - &logits[r * vocab]);
            CHECK(out[r].id == want, "row %u of %u: %u, not %u", r, vocab, out[r].id, want);
        }
    }
    CHECK(sample({NAN, 1.0f}, {greedy()})[0].id == 0, "nothing is larger than a first logit that is not a number");
    CHECK(sample({1.0f, NAN, 2.0f}, {greedy()})[0].id == 2, "a later one is passed over");
    CHECK(sample({-0.0f, 0.0f}, {greedy()})[0].id == 0, "zeros are equal");
    CHECK(sample({-INFINITY, -INFINITY}, {greedy()})[0].id == 0, "all forbidden");
    sample({}, {});
}

TEST(draws_are_those_of_a_sampler_that_sorts) {
    Random random{19};
    u32 compared = 0, near = 0;
    for (u32 vocab : {1u, 2u, 37u, 700u, 5003u}) {
        if (quick && vocab > 700) continue;
        std::vector<SampleRow> rows;
        for (u32 i = 0; i < (quick ? 4u : 12u); i++) {
            u64 seed = random.next();
            float temperature = i % 3 == 0 ? 0.7f : i % 3 == 1 ? 1.0f : 2.5f;
            rows.push_back(drawn(seed, i, temperature));
            rows.push_back(drawn(seed, i, temperature, 1 + i * 7));
            rows.push_back(drawn(seed, i, temperature, 0, 0.1f + 0.08f * i));
            rows.push_back(drawn(seed, i, temperature, 0, 1.0f, 0.02f * i));
            rows.push_back(drawn(seed, i, temperature, 40, 0.9f, 0.05f));
        }
        std::vector<float> logits = random_logits(static_cast<u32>(rows.size()) * vocab, random, 2.0);
        std::vector<Sampled> out = sample(logits, rows);
        for (u32 r = 0; r < rows.size(); r++) {
            i64 want = reference(&logits[static_cast<u64>(r) * vocab], vocab, rows[r]);
            compared++;
            near += want < 0;
            CHECK(want < 0 || out[r].id == want, "row %u of %u (T %g, k %u, p %g, min %g): %u, not %lld", r, vocab, rows[r].temperature,
                  rows[r].top_k, rows[r].top_p, rows[r].min_p, out[r].id, want);
        }
    }
    CHECK(near * 10 < compared, "%u of %u rows were too near a boundary to compare", near, compared);
}

TEST(filters_keep_exactly_what_they_should) {
    // 0.5, 0.3, 0.15, 0.05, with ties behind: what is ever drawn, over many seeds.
    std::vector<float> one = {std::log(0.3f), std::log(0.5f), std::log(0.05f), std::log(0.15f)};
    auto seen = [&](SampleRow row) {
        std::vector<float> logits;
        std::vector<SampleRow> rows;
        for (u32 i = 0; i < (quick ? 3u : 32u); i++) {
            logits.insert(logits.end(), one.begin(), one.end());
            rows.push_back(row);
            rows.back().seed = i * 77;
        }
        u32 out = 0;
        for (const Sampled& s : sample(logits, rows)) out |= 1u << s.id;
        return out;
    };
    CHECK(seen(drawn(0, 0, 1.0f, 1)) == 0b0010, "top-k 1");
    CHECK(seen(drawn(0, 0, 1.0f, 0, 1e-6f)) == 0b0010, "the likeliest is always kept");
    CHECK(seen(drawn(0, 0, 1.0f, 0, 1.0f, 1.0f)) == 0b0010, "min-p 1");
    if (quick) return;
    CHECK(seen(drawn(0, 0, 1.0f, 2)) == 0b0011, "top-k 2");
    CHECK(seen(drawn(0, 0, 1.0f, 0, 0.79f)) == 0b0011, "top-p 0.79");
    CHECK(seen(drawn(0, 0, 1.0f, 0, 0.81f)) == 0b1011, "top-p 0.81");
    CHECK(seen(drawn(0, 0, 1.0f, 0, 1.0f, 0.25f)) == 0b1011, "min-p 0.25");
    // Top-k cuts among equals by id.
    one = {1.0f, 2.0f, 2.0f, 2.0f};
    CHECK(seen(drawn(0, 0, 1.0f, 2)) == 0b0110, "equals go by id");
    one = {1.0f, 1.0f, 1.0f, 1.0f};
    CHECK(seen(drawn(0, 0, 1.0f, 0, 0.5f)) == 0b0011, "a share that is reached exactly needs no more");
    one = {-INFINITY, 1.0f, -INFINITY, 1.0f};
    CHECK(seen(drawn(0, 0)) == 0b1010, "what is forbidden is never drawn");
    CHECK(seen(drawn(0, 0, 1.0f, 4, 0.999f)) == 0b1010, "nor after filters");
}

/// Rows of one vocabulary with all kinds of filters, against the sampler that sorts.
static void compare(const char* what, u32 vocab, const std::function<float(u32 row, u32 id)>& logit, float temperature = 1.0f) {
    std::vector<SampleRow> rows;
    for (u32 i = 0; i < (quick ? 1u : 3u); i++) {
        u64 seed = 1000 * vocab + i;
        rows.push_back(drawn(seed, i, temperature));
        rows.push_back(drawn(seed, i, temperature, 1 + vocab / 3));
        rows.push_back(drawn(seed, i, temperature, 2));
        rows.push_back(drawn(seed, i, temperature, 0, 0.77f));
        rows.push_back(drawn(seed, i, temperature, vocab - vocab / 5, 0.93f, 0.04f));
    }
    std::vector<float> logits;
    for (u32 r = 0; r < rows.size(); r++) {
        for (u32 id = 0; id < vocab; id++) logits.push_back(logit(r, id));
    }
    std::vector<Sampled> out = sample(logits, rows);
    for (u32 r = 0; r < rows.size(); r++) {
        i64 want = reference(&logits[static_cast<u64>(r) * vocab], vocab, rows[r]);
        CHECK(want < 0 || out[r].id == want, "%s, row %u of %u: %u, not %lld", what, r, vocab, out[r].id, want);
    }
}

TEST(a_sampler_draws_from_crowded_and_from_sparse_vocabularies) {
    Random random{37};
    for (u32 vocab : {3u, 30u, 513u, 4099u}) {
        if (quick && vocab == 4099) continue;
        compare("all equal", vocab, [](u32, u32) { return 1.5f; });
        compare("all close", vocab, [&](u32, u32) { return 3.0f + static_cast<float>(random.uniform()) / 128; });
        compare("two values", vocab, [&](u32 r, u32 id) { return (id + r) % 3 == 0 ? 2.0f : 1.0f; });
        compare("ties far apart", vocab, [&](u32 r, u32 id) { return id % (vocab / 3) == r % 2 ? 5.0f : static_cast<float>(id % 7) / 8; });
        auto few = [&](u32, u32 id) { return id % (1 + vocab / 3) == 1 ? 0.25f * static_cast<float>(id % 5) : -INFINITY; };
        compare("nearly all forbidden", vocab, few);
        // Many steps with few each: more lie above the target's than have room.
        compare("flat", vocab, [&](u32, u32) { return static_cast<float>(8 * random.uniform()); }, 16.0f);
        // Everything far below the largest.
        compare("far apart", vocab, [&](u32, u32 id) { return id == vocab / 2 ? 90.0f : static_cast<float>(-3 * random.uniform()); });
    }
}

TEST(a_sampler_sums_large_weights_without_losing_a_carry) {
    // Sums of one step pass 2^32 many times; a lost one would move the draw.
    for (u32 vocab : {900u, 20011u}) {
        if (quick && vocab == 20011) continue;
        compare("large weights", vocab, [](u32 r, u32 id) { return -0.1f * static_cast<float>((id + r) % 11) - 1e-4f * static_cast<float>(id % 5); });
    }
}

TEST(a_sampler_passes_over_what_is_not_a_number) {
    std::vector<float> logits = {1.0f, 2.0f, NAN, 3.0f, 0.0f, -NAN, 2.5f};
    // The first of the order is no number and has no weight; with two candidates the likeliest is left.
    for (u64 seed = 0; seed < 4; seed++) CHECK(sample(logits, {drawn(seed, 0, 1.0f, 2)})[0].id == 3, "seed %llu", seed);
    logits[2] = -NAN;
    for (u64 seed = 0; seed < 4; seed++) {
        u32 id = sample(logits, {drawn(seed, 0, 4.0f, 2)})[0].id;
        CHECK(id == 3 || id == 6, "seed %llu: %u", seed, id);
    }
    CHECK(sample({INFINITY, 1.0f, INFINITY}, {drawn(1, 1, 1.0f, 2)})[0].id == 0, "nothing has a weight");
    CHECK(sample({-INFINITY, -INFINITY}, {drawn(1, 1)})[0].id == 0, "all forbidden");
}

TEST(a_draw_is_a_function_of_its_row_alone) {
    Random random{23};
    u32 vocab = 300;
    std::vector<float> logits = random_logits(4 * vocab, random, 1.0);
    std::vector<SampleRow> rows = {drawn(1, 5), drawn(2, 6, 0.8f, 20, 0.9f), drawn(3, 7), greedy()};
    std::vector<Sampled> all = sample(logits, rows);
    std::vector<float> second(logits.begin() + vocab, logits.begin() + 2 * vocab);
    CHECK(sample(second, {rows[1]})[0].id == all[1].id, "alone and in a batch"); // I1
}

/// As crates/types/src/digest.rs defines it: two values a lane, an odd last one beside 0.
static u64 digest(const std::vector<float>& values) {
    u64 sum = 0;
    for (size_t lane = 0; 2 * lane < values.size(); lane++) {
        u64 low = std::bit_cast<u32>(values[2 * lane]), high = 2 * lane + 1 < values.size() ? std::bit_cast<u32>(values[2 * lane + 1]) : 0;
        u64 x = (low | high << 32) ^ (lane + 1) * 0x9e3779b97f4a7c15ull;
        sum += (x & 0xffffffff) * (x >> 32) + (x << 32 | x >> 32);
    }
    return sum;
}

TEST(log_probabilities_are_the_models_own) {
    Random random{29};
    for (u32 vocab : {5u, 64u, 1501u, 1503u}) {
        // The last ones are nearly alike: too many to gather.
        std::vector<float> raw = random_logits(vocab, random, vocab == 1503 ? 0.01 : 2.0);
        for (float& x : raw) x += 1.0f;
        std::vector<float> logits = raw;
        logits[vocab - 1] += 100.0f;
        for (u32 top : {0u, 1u, 5u, 20u}) {
            SampleRow row = greedy();
            row.top_logprobs = top;
            Sampled out = sample(logits, {row}, &raw)[0];
            double largest = *std::max_element(raw.begin(), raw.end()), sum = 0;
            for (float x : raw) sum += std::exp(x - largest);
            double log_sum = largest + std::log(sum);
            CHECK(out.id == vocab - 1, "the bias decides");
            CHECK_NEAR(out.logprob, raw[vocab - 1] - log_sum, 1e-5, "of the chosen token");
            CHECK(out.digest == digest(raw), "digest of %u logits", vocab);
            std::vector<u32> order(vocab);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return raw[a] > raw[b]; });
            for (u32 i = 0; i < std::min(top, vocab); i++) {
                CHECK(out.top_ids[i] == order[i], "the %uth likeliest of %u is %u, not %u", i, vocab, out.top_ids[i], order[i]);
                CHECK_NEAR(out.top_logprobs[i], raw[order[i]] - log_sum, 1e-5, "the %uth likeliest", i);
            }
        }
    }
}

TEST(penalties_and_masks_change_what_they_name) {
    std::vector<float> logits = {2.0f, -2.0f, 1.0f, 0.5f, 7.0f, 7.0f, 7.0f, 7.0f};
    std::vector<LogitEntry> entries = {{0, 0, 4.0f, 0.0f, 0.0f}, {0, 1, 4.0f, 0.25f, 0.0f}, {0, 3, 1.0f, 1.5f, 3.0f}, {1, 2, 1.0f, 0.0f, -100.0f}};
    run(baton_adjust_logits, AdjustLogits{logits.data(), entries.data(), 4, 4});
    CHECK(logits == (std::vector<float>{0.5f, -8.25f, 1.0f, 2.0f, 7.0f, 7.0f, -93.0f, 7.0f}), "penalties");
    run(baton_adjust_logits, AdjustLogits{logits.data(), entries.data(), 0, 4});

    Random random{31};
    for (u32 vocab : {1u, 31u, 33u, 700u}) {
        std::vector<float> x(3 * vocab, 1.0f);
        std::vector<u32> rows = {2, 0}, masks(2 * parts(vocab, 32));
        for (u32& word : masks) word = static_cast<u32>(random.next());
        run(baton_mask_logits, MaskLogits{x.data(), rows.data(), masks.data(), 2, vocab});
        for (u32 r = 0; r < 3; r++) {
            for (u32 id = 0; id < vocab; id++) {
                bool allowed = r == 1 || masks[(r == 0) * parts(vocab, 32) + id / 32] >> (id % 32) & 1;
                CHECK(x[r * vocab + id] == (allowed ? 1.0f : -INFINITY), "row %u token %u of %u", r, id, vocab);
            }
        }
    }
}

} // namespace test
