// Runs the tests of kernels in the host shim: all, or those whose names contain an argument; `--quick` for few and small cases.
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
    for (int i = 1; i < count; i++) {
        if (std::strcmp(args[i], "--quick") == 0) {
            test::quick = true;
        } else {
            wanted.push_back(args[i]);
        }
    }
    int ran = 0;
    for (const test::Test& t : test::tests()) {
        bool take = wanted.empty();
        for (const char* part : wanted) take = take || std::strstr(t.name, part);
        if (!take) continue;
        auto began = std::chrono::steady_clock::now();
        // OS threads come in an order of their own.
        for (shim::Order order : {shim::Order::Ascending, shim::Order::Descending, shim::Order::Shuffled}) {
            test::order = order;
            t.run();
            if (test::quick) break;
        }
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        std::printf("%-60s %6.2f s\n", t.name, took.count());
        std::fflush(stdout);
        ran++;
    }
    std::printf("%d tests passed\n", ran);
    return ran == 0;
}
