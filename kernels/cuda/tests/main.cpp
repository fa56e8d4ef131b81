// Runs the tests of kernels in the host shim: all, or those whose names contain an argument; `--quick` for few and small cases, in one
// order of threads; `--part=I/N` for every Nth test from the Ith on.
#include "harness.hpp"

#include <chrono>
#include <cstring>

namespace test {

shim::Order order = shim::Order::Ascending;
bool quick = false;

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

} // namespace test

int main(int count, char** args) {
    std::vector<const char*> wanted;
    bool quick_only = false;
    unsigned part = 0, parts = 1;
    for (int i = 1; i < count; i++) {
        if (std::strcmp(args[i], "--quick") == 0) {
            quick_only = true;
        } else if (std::sscanf(args[i], "--part=%u/%u", &part, &parts) == 2) {
            continue;
        } else {
            wanted.push_back(args[i]);
        }
    }
    unsigned ran = 0, found = 0;
    for (const test::Test& t : test::tests()) {
        bool take = wanted.empty();
        for (const char* word : wanted) take = take || std::strstr(t.name, word);
        if (!take || found++ % parts != part) continue;
        auto began = std::chrono::steady_clock::now();
        for (shim::Order order : {shim::Order::Ascending, shim::Order::Descending, shim::Order::Shuffled}) {
            test::order = order;
            test::quick = quick_only || order != shim::Order::Ascending;
            t.run();
            if (quick_only) break;
        }
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        std::printf("%-60s %6.2f s\n", t.name, took.count());
        std::fflush(stdout);
        ran++;
    }
    std::printf("%u tests passed\n", ran);
    return found == 0;
}
