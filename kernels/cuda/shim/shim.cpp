// The machinery of the host shim: fibers, the barrier, the warp's exchange, shared variables. Blocks run one after the other. Knows
// nothing of any kernel.
//
// With BATON_SHIM_RACES each fiber is a thread to ThreadSanitizer, and only what orders memory on a GPU orders it here: barriers and
// __syncwarp, the begin and the end of a launch, fences around an atomic; not shuffles or votes, and not that one fiber happens to run before
// another. Fibers serve block after block, so a barrier orders what their earlier blocks did, too: a missing fence between blocks is not
// seen. This file itself is built without ThreadSanitizer.
#include "shim.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef BATON_SHIM_RACES
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
#endif

namespace shim {

void release([[maybe_unused]] void* at) {
#ifdef BATON_SHIM_RACES
    __tsan_release(at);
#endif
}

void acquire([[maybe_unused]] void* at) {
#ifdef BATON_SHIM_RACES
    __tsan_acquire(at);
#endif
}

namespace {

/// A warp's collectives. Two sets of words: a lane can be at most one collective ahead of another.
struct Warp {
    Barrier barrier;
    Words words[2][32];
    Collective called[2][32];
};

struct Block {
    Barrier barrier;
    std::vector<Warp> warps;
    std::map<const void*, std::unique_ptr<void, void (*)(void*)>> shared;
    Order order = Order::Ascending;
    std::size_t dynamic_bytes = 0;
    std::vector<std::function<void()>> pending;
    std::shared_ptr<void> beside;
};

Block* block = nullptr;

constexpr std::size_t STACK = 256 << 10;

extern "C" void shim_switch(void** save, void* load);
// Saves what the ABI makes the callee keep, changes stacks, restores. swapcontext would ask the kernel for the signal mask each time.
asm(R"(
.text
.globl shim_switch
.type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size shim_switch, .-shim_switch
)");

struct Fiber {
    Thread thread;
    void* sp = nullptr;
    void* stack = nullptr;
    void* fake = nullptr;
    /// None: it can run. Otherwise until the barrier is past this generation.
    Barrier* waiting = nullptr;
    unsigned generation = 0;
    bool done = false;
    /// Whether the latest fence is behind the latest barrier, and the atomics since.
    bool fenced = false;
    std::vector<void*> counted;
};

Fiber* running = nullptr;
void* scheduler = nullptr;
/// What is ordered before all threads of a launch, and what all of them are ordered before.
char launched, finished;
const std::function<void()>* kernel = nullptr;
std::vector<std::unique_ptr<char[]>> stacks;

#ifdef BATON_SHIM_RACES
/// ThreadSanitizer's threads: the scheduler's, and one for each fiber, used again in the next block.
void* home_context = nullptr;
std::vector<void*> contexts;
#endif

#if defined(__SANITIZE_ADDRESS__)
const void* home = nullptr;
std::size_t home_size = 0;
#endif

/// From a fiber to the scheduler; comes back when the fiber is resumed, and never when it is done.
void to_scheduler() {
    [[maybe_unused]] Fiber* self = running;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(self->done ? nullptr : &self->fake, home, home_size);
#endif
#ifdef BATON_SHIM_RACES
    __tsan_switch_to_fiber(home_context, 1);
#endif
    shim_switch(&self->sp, scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(self->fake, nullptr, nullptr);
#endif
}

void to_fiber(Fiber& fiber) {
    running = &fiber;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack, STACK);
#endif
#ifdef BATON_SHIM_RACES
    __tsan_switch_to_fiber(contexts[fiber.thread.linear], 1);
#endif
    shim_switch(&scheduler, fiber.sp);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void block_until_past(Barrier& barrier, unsigned generation) {
    running->waiting = &barrier;
    running->generation = generation;
    to_scheduler();
}

/// Does one of the block's pending works; false when there is none.
bool work(std::size_t which) {
    if (block->pending.empty()) return false;
    std::size_t at = which % block->pending.size();
    auto now = std::move(block->pending[at]);
    block->pending.erase(block->pending.begin() + static_cast<std::ptrdiff_t>(at));
    now();
    return true;
}

void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &home, &home_size);
#endif
    acquire(&launched);
    (*kernel)();
    release(&finished);
    block->barrier.expected--;
    block->barrier.complete();
    running->done = true;
    to_scheduler();
    std::abort();
}

std::vector<Fiber> fibers;

/// Everything fibers need, made before the launch is released to them.
void make_fibers(unsigned count) {
    if (fibers.size() < count) fibers.resize(count);
    while (stacks.size() < count) {
        stacks.emplace_back(new char[STACK]);
#ifdef BATON_SHIM_RACES
        contexts.push_back(__tsan_create_fiber(0));
#endif
    }
}

/// A fiber that will begin with fiber_main.
void prepare(Fiber& fiber, const Thread& first, unsigned i) {
    fiber = Fiber{};
    fiber.thread = first;
    fiber.thread.linear = i;
    dim3 dim = first.block_dim;
    fiber.thread.thread = {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
    fiber.stack = stacks[i].get();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, STACK);
#endif
    auto top = reinterpret_cast<std::uintptr_t>(fiber.stack) + STACK;
    auto* words = reinterpret_cast<void**>(top & ~std::uintptr_t{15});
    *--words = nullptr;
    *--words = reinterpret_cast<void*>(fiber_main);
    for (int k = 0; k < 6; k++) *--words = nullptr;
    fiber.sp = words;
}

void run_block(const std::function<void()>& body, const Thread& first, Order order) {
    unsigned count = first.block_dim.x * first.block_dim.y * first.block_dim.z;
    std::vector<Fiber*> turns;
    kernel = &body;
    for (unsigned i = 0; i < count; i++) {
        prepare(fibers[i], first, i);
        turns.push_back(&fibers[i]);
    }
    static std::mt19937 random(1);
    if (order == Order::Descending) std::reverse(turns.begin(), turns.end());
    for (unsigned left = count; left > 0;) {
        if (order == Order::Shuffled) std::shuffle(turns.begin(), turns.end(), random);
        bool moved = false;
        for (Fiber* fiber : turns) {
            if (fiber->done || (fiber->waiting && fiber->waiting->generation == fiber->generation)) continue;
            fiber->waiting = nullptr;
            moved = true;
            to_fiber(*fiber);
            left -= fiber->done;
        }
        if (order == Order::Shuffled && random() % 2) moved |= work(random());
        if (!moved && !work(0)) fail("threads of a block wait for others that never come");
    }
    if (!block->pending.empty()) fail("a block ends before what it has asked for is done");
}

} // namespace

void fence() {
    for (void* at : running->counted) acquire(at);
    running->counted.clear();
    running->fenced = true;
}

void counted(void* at) {
    if (running->fenced) release(at);
    running->counted.push_back(at);
}

void wait(Barrier& barrier, bool orders_memory) {
    running->fenced &= !orders_memory;
    unsigned before = barrier.generation;
    if (orders_memory) release(&barrier.order[before & 1]);
    barrier.arrived++;
    if (!barrier.complete()) block_until_past(barrier, before);
    if (orders_memory) acquire(&barrier.order[before & 1]);
}

void arrive(Barrier& barrier) {
    release(&barrier.order[barrier.generation & 1]);
    barrier.arrived++;
    barrier.complete();
}

void wait_past(Barrier& barrier, unsigned generation) {
    if (barrier.generation == generation) block_until_past(barrier, generation);
    acquire(&barrier.order[generation & 1]);
}

Order order_of_turns() { return block->order; }

void later(std::function<void()> work) {
    if (block->order == Order::Ascending) return work();
    block->pending.push_back(std::move(work));
}

std::shared_ptr<void>& beside() { return block->beside; }

void fail(const char* why) {
    std::fprintf(stderr, "shim: %s\n", why);
    std::abort();
}

Thread& current() {
    return running->thread;
}

std::size_t dynamic_bytes() { return block->dynamic_bytes; }

void launch(dim3 grid, dim3 dim, std::size_t dynamic_bytes, const std::function<void()>& body, Order order) {
    unsigned count = dim.x * dim.y * dim.z;
    if (count == 0 || count > 1024 || count % 32 != 0) fail("a block's threads must be whole warps, up to 1024");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) fail("an empty grid; the launcher must skip the launch");
#ifdef BATON_SHIM_RACES
    home_context = __tsan_get_current_fiber();
#endif
    make_fibers(count);
    Block now;
    block = &now;
    now.warps.resize(count / 32);
    now.order = order;
    now.dynamic_bytes = dynamic_bytes;
    release(&launched);
    std::vector<std::size_t> blocks(std::size_t{grid.x} * grid.y * grid.z);
    std::iota(blocks.begin(), blocks.end(), 0);
    static std::mt19937 random(2);
    if (order == Order::Descending) std::reverse(blocks.begin(), blocks.end());
    if (order == Order::Shuffled) std::shuffle(blocks.begin(), blocks.end(), random);
    for (std::size_t at : blocks) {
        now.barrier = {};
        now.barrier.expected = count;
        for (Warp& warp : now.warps) {
            warp = {};
            warp.barrier.expected = 32;
        }
        Thread first{};
        first.block = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                       static_cast<unsigned>(at / grid.x / grid.y)};
        first.block_dim = dim;
        first.grid_dim = grid;
        run_block(body, first, order);
        // Before the block's shared variables are freed.
        acquire(&finished);
        now.beside.reset();
        now.shared.clear();
    }
    block = nullptr;
}

void sync_threads() { wait(block->barrier, true); }

const Words* exchange(Collective collective, const std::uint32_t* words, int count) {
    unsigned lane = current().linear % 32;
    Warp& warp = block->warps[current().linear / 32];
    // The set alternates; each lane counts its own collectives by the barrier's generation, which no lane can be ahead of.
    unsigned set = warp.barrier.generation & 1;
    for (int i = 0; i < count; i++) warp.words[set][lane][i] = words[i];
    warp.called[set][lane] = collective;
    wait(warp.barrier, collective == Collective::SyncWarp);
    if (warp.called[set][(lane + 1) % 32] != collective) fail("lanes of a warp meet in different collectives");
    return warp.words[set];
}

void* shared(const void* key, std::size_t bytes, std::size_t align) {
    auto found = block->shared.find(key);
    if (found == block->shared.end()) {
        std::size_t padded = (bytes + align - 1) / align * align;
        void* memory = std::aligned_alloc(align < sizeof(void*) ? sizeof(void*) : align, padded < align ? align : padded);
        if (!memory) fail("no memory");
        std::memset(memory, 0xff, bytes);
        found = block->shared.emplace(key, std::unique_ptr<void, void (*)(void*)>(memory, std::free)).first;
        release(memory);
    }
    acquire(found->second.get());
    return found->second.get();
}

} // namespace shim
