// See units.hpp. Built without ThreadSanitizer, which is told of the ranges that units read and write.
#include "units.hpp"

#include <array>
#include <deque>
#include <map>
#include <vector>

#ifdef BATON_SHIM_RACES
extern "C" {
void __tsan_read_range(void* at, unsigned long bytes);
void __tsan_write_range(void* at, unsigned long bytes);
}
#endif

namespace shim {
namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

/// Where shared memory begins: a swizzle's pattern begins at multiples of 1024.
constexpr u32 FIRST = 1024;
/// Bytes that a row of a swizzled tile has.
constexpr u32 ROW = 128;

void reads([[maybe_unused]] const void* at, [[maybe_unused]] u64 bytes) {
#ifdef BATON_SHIM_RACES
    __tsan_read_range(const_cast<void*>(at), bytes);
#endif
}
void writes([[maybe_unused]] void* at, [[maybe_unused]] u64 bytes) {
#ifdef BATON_SHIM_RACES
    __tsan_write_range(at, bytes);
#endif
}

/// An mbarrier: a phase ends when as many have arrived as it was made for and all bytes that were announced are there.
struct Phase {
    Barrier barrier;
    unsigned arrivals = 0;
    unsigned pending = 0;
    long bytes = 0;

    void end_if_complete() {
        if (pending > 0 || bytes != 0) return;
        pending = arrivals;
        barrier.generation++;
    }
};

/// A product, and which lanes' words are its A.
struct Product {
    Wgmma what;
    std::array<const u32*, 4> quad;
};

/// The products of a thread: those of groups that were committed, and those since.
struct Products {
    std::deque<std::vector<Product>> groups;
    std::vector<Product> open;
    bool fenced = false;
    unsigned asked = 0;

    /// Whether some are put off.
    bool behind() const {
        bool some = !open.empty();
        for (const auto& group : groups) some = some || !group.empty();
        return some;
    }
};

struct Units {
    /// Shared memory, and as units see it.
    u8* shared = nullptr;
    std::vector<u8> seen;
    bool stale = false;
    std::map<const void*, Phase> phases;
    std::map<unsigned, Barrier> named;
    std::map<unsigned, Products> products;

    ~Units() {
        for (const auto& [at, phase] : phases) {
            if (phase.bytes != 0) fail("a block ends with bytes announced that never came");
        }
        for (const auto& [id, barrier] : named) {
            if (barrier.arrived != 0) fail("a block ends with arrivals at a barrier that nobody waits for");
        }
        for (const auto& [thread, of] : products) {
            if (!of.open.empty() || !of.groups.empty()) fail("a block ends before its products are done");
        }
    }
};

Units& units() {
    std::shared_ptr<void>& slot = beside();
    if (!slot) slot = std::make_shared<Units>();
    return *static_cast<Units*>(slot.get());
}

Phase& phase(const void* barrier) {
    auto found = units().phases.find(barrier);
    if (found == units().phases.end()) fail("an mbarrier that was not initialised");
    return found->second;
}

/// The swizzle of 128 bytes: which sixteen bytes of a row, by which row of eight, of addresses.
u32 swizzled(u32 address) { return address ^ (address >> 3 & 0x70); }

/// Sixteen bytes or less at an address of the window, as units see them.
u8* seen(u32 address, u32 bytes) {
    Units& u = units();
    if (address < FIRST || address - FIRST + bytes > u.seen.size()) fail("a unit is sent beyond the block's shared memory");
#ifdef BATON_SHIM_RACES
    // Ranges are told one by one; a copy of everything would look like a read of it.
    return u.shared + (address - FIRST);
#else
    if (u.stale) std::memcpy(u.seen.data(), u.shared, u.seen.size());
    u.stale = false;
    return &u.seen[address - FIRST];
#endif
}

std::uint16_t element_at(u32 address) {
    address = swizzled(address);
    reads(units().shared + (address - FIRST), 2);
    std::uint16_t bits;
    std::memcpy(&bits, seen(address, 2), 2);
    return bits;
}

/// A matrix descriptor: start, leading and stride offsets in sixteen bytes, base offset, swizzle.
struct Operand {
    u32 start, leading, stride;

    explicit Operand(u64 descriptor)
        : start((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4), stride((descriptor >> 32 & 0x3fff) << 4) {
        if (descriptor >> 62 != 1) fail("a descriptor of another swizzle than 128 bytes");
        if (descriptor & 0x3fffc000c000c000ull) fail("a descriptor with bits that must be 0");
    }
    /// Element k of row (or column) i; K-major: k runs through a row of 128 bytes.
    std::uint16_t at(u32 i, u32 k, bool transposed) const {
        if (!transposed) return element_at(start + i / 8 * stride + i % 8 * ROW + 2 * k);
        return element_at(start + i / 64 * leading + i % 64 * 2 + k / 8 * stride + k % 8 * ROW);
    }
};

/// This thread's part: with g = lane / 4 and t = lane % 4, sum 4j + 2h + e is row 16 · warp + g + 8h, column 8j + 2t + e; word
/// h + 2k of A is the same row, columns 8k + 2t and the next.
void compute(const Product& product) {
    const Wgmma& w = product.what;
    u32 lane = current().linear % 32, warp = current().linear / 32 % 4, g = lane / 4, t = lane % 4;
    float a[2][16];
    for (u32 h = 0; h < 2; h++) {
        for (u32 k = 0; k < 16; k++) {
            std::uint16_t bits;
            if (w.a) {
                u32 word = product.quad[k % 8 / 2][h + k / 8 * 2];
                bits = static_cast<std::uint16_t>(k % 2 ? word >> 16 : word);
            } else {
                bits = Operand(w.a_shared).at(16 * warp + g + 8 * h, k, false);
            }
            a[h][k] = w.element(bits);
        }
    }
    Operand b(w.b_shared);
    for (u32 j = 0; j < w.n / 8; j++) {
        for (u32 e = 0; e < 2; e++) {
            float column[16];
            for (u32 k = 0; k < 16; k++) column[k] = w.element(b.at(8 * j + 2 * t + e, k, w.b_transposed));
            for (u32 h = 0; h < 2; h++) {
                float& d = w.d[4 * j + 2 * h + e];
                float sum = w.accumulate ? d : 0.0f;
                for (u32 k = 0; k < 16; k++) sum = std::fma(a[h][k], column[k], sum);
                d = sum;
            }
        }
    }
}

/// All lanes of the warp are here: none has changed the registers that others read.
const Words* together(const u32* words, int count) { return exchange(Collective::Wgmma, words, count); }

/// What encode_rows writes.
struct RowMap {
    u8* base;
    u64 width, rows, stride;
    u32 box_width, box_rows;
    u64 sign;
};
constexpr u64 SIGN = 0x7261776f72786f62ull;

} // namespace

std::uint32_t shared_address(const void* at) {
    auto offset = static_cast<const u8*>(at) - units().shared;
    if (offset < 0 || static_cast<u64>(offset) >= units().seen.size()) fail("an address outside of the block's dynamic shared memory");
    return FIRST + static_cast<u32>(offset);
}

void* dynamic_shared(const void* key, std::size_t bytes, std::size_t align) {
    if (bytes != dynamic_bytes()) fail("a launch with other dynamic shared memory than the kernel has");
    void* memory = shared(key, bytes, align);
    Units& u = units();
    if (!u.shared) {
        u.shared = static_cast<u8*>(memory);
        u.seen.assign(bytes, 0xff);
    }
    return memory;
}

void phase_init(const void* barrier, unsigned arrivals) {
    Phase made;
    made.arrivals = made.pending = arrivals;
    units().phases[barrier] = made;
}

void phase_arrive(const void* barrier) {
    Phase& p = phase(barrier);
    if (p.pending == 0) fail("more arrivals at an mbarrier than its phase takes");
    release(&p.barrier.order[p.barrier.generation & 1]);
    p.pending--;
    p.end_if_complete();
}

void phase_expect(const void* barrier, unsigned bytes) {
    phase(barrier).bytes += bytes;
    phase_arrive(barrier);
}

void phase_wait(const void* barrier, unsigned parity) {
    Phase& p = phase(barrier);
    while ((p.barrier.generation & 1) == (parity & 1)) wait_past(p.barrier, p.barrier.generation);
    acquire(&p.barrier.order[parity & 1]);
}

void named_sync(unsigned id, unsigned threads) {
    Barrier& barrier = units().named[id];
    barrier.expected = threads;
    wait(barrier, true);
}

void named_arrive(unsigned id, unsigned threads) {
    Barrier& barrier = units().named[id];
    barrier.expected = threads;
    arrive(barrier);
}

void async_fence() { units().stale = true; }

bool encode_rows(void* map, void* base, u64 width, u64 rows, u64 stride, u32 box_width, u32 box_rows) {
    if (reinterpret_cast<u64>(base) % 16 || stride % 16 || stride >= 1ull << 40 || !width || !rows || (width | rows) >> 32) return false;
    if (!box_width || box_width > 256 || !box_rows || box_rows > 256 || box_width * 2 % 16 || box_width * 2 > ROW) return false;
    RowMap made{static_cast<u8*>(base), width, rows, stride, box_width, box_rows, SIGN};
    static_assert(sizeof made <= 128);
    std::memset(map, 0, 128);
    std::memcpy(map, &made, sizeof made);
    return true;
}

void copy_box(void* to, const void* map, const void* barrier, int x, int y) {
    RowMap m;
    std::memcpy(&m, map, sizeof m);
    if (m.sign != SIGN || reinterpret_cast<u64>(map) % 128) fail("a tensor map that is none, or not at a multiple of 128");
    u32 first = shared_address(to);
    if (first % ROW) fail("a box must begin at a multiple of 128");
    later([=] {
        Units& u = units();
        for (u32 row = 0; row < m.box_rows; row++) {
            for (u32 piece = 0; piece < m.box_width / 8; piece++) {
                u32 at = swizzled(first + row * m.box_width * 2 + piece * 16);
                std::uint16_t bits[8] = {};
                for (u32 i = 0; i < 8; i++) {
                    long column = static_cast<long>(x) + piece * 8 + i, line = static_cast<long>(y) + row;
                    if (column < 0 || line < 0 || static_cast<u64>(column) >= m.width || static_cast<u64>(line) >= m.rows) continue;
                    const u8* from = m.base + static_cast<u64>(line) * m.stride + static_cast<u64>(column) * 2;
                    reads(from, 2);
                    std::memcpy(&bits[i], from, 2);
                }
                std::memcpy(seen(at, 16), bits, 16);
                writes(u.shared + (at - FIRST), 16);
                std::memcpy(u.shared + (at - FIRST), bits, 16);
            }
        }
        Phase& p = phase(barrier);
        release(&p.barrier.order[p.barrier.generation & 1]);
        p.bytes -= static_cast<long>(m.box_rows) * m.box_width * 2;
        p.end_if_complete();
    });
}

void wgmma_fence() { units().products[current().linear].fenced = true; }

void wgmma(const Wgmma& what) {
    Products& mine = units().products[current().linear];
    if (!mine.fenced) fail("wgmma without a wgmma.fence since registers were free to change");
    Product product{what, {}};
    auto a = reinterpret_cast<u64>(what.a);
    u32 words[2] = {static_cast<u32>(a), static_cast<u32>(a >> 32)};
    const Words* all = together(words, 2);
    for (u32 i = 0; i < 4; i++) {
        const Words& from = all[current().linear % 32 / 4 * 4 + i];
        product.quad[i] = reinterpret_cast<const u32*>(static_cast<u64>(from[1]) << 32 | from[0]);
    }
    // All lanes of a warp choose the same. What was put off comes first.
    bool now = order_of_turns() == Order::Descending || (order_of_turns() == Order::Shuffled && mine.asked++ % 2);
    if (!now || mine.behind()) return mine.open.push_back(product);
    compute(product);
    together(nullptr, 0);
}

void wgmma_commit() {
    Products& mine = units().products[current().linear];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}

void wgmma_wait(unsigned groups) {
    Products& mine = units().products[current().linear];
    if (!mine.open.empty()) fail("wgmma.wait_group with products of no group");
    together(nullptr, 0);
    // Time for others to overwrite what was let go too early.
    for (int turn = 0; turn < 4 && mine.behind(); turn++) together(nullptr, 0);
    while (mine.groups.size() > groups) {
        for (const Product& product : mine.groups.front()) compute(product);
        mine.groups.pop_front();
    }
    together(nullptr, 0);
    mine.fenced = false;
}

} // namespace shim
