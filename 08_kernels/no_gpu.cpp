// What this chapter's programs are in a build without CUDA: one sentence, whatever their flags.

#include <algorithm>
#include <cstdio>
#include <string>

int main(int argc, char** argv) {
  std::fprintf(
      stderr,
      "This chapter runs kernels on a GPU, and this build has no CUDA: build it where nvcc "
      "is.\n");
  auto asks = [&](const char* flag) {
    return std::any_of(argv + 1, argv + argc,
                       [&](const char* arg) { return std::string(arg) == flag; });
  };
  return asks("--dry-run") || asks("--help") || asks("-h") ? 0 : 1;
}
