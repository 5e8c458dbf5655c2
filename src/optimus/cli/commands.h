// One function a command: it adds the command's options to the program and returns nothing; the command's callback does
// the work and throws Error on failure. A command prints its result to standard output, one JSON line last where it has
// one.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace optimus {

void add_train(CLI::App& program);
void add_tokenize(CLI::App& program);
void add_generate(CLI::App& program);
void add_eval(CLI::App& program);
void add_import(CLI::App& program);
void add_export(CLI::App& program);
void add_inspect(CLI::App& program);
void add_verify(CLI::App& program);
void add_plan(CLI::App& program);
void add_bench(CLI::App& program);
void add_bench_comm(CLI::App& bench);  ///< a mode of bench

}  // namespace optimus
