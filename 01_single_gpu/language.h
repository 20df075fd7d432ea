#pragma once
// Between what people read and what a model reads. A model without a tokenizer speaks in ids.

#include <optional>
#include <string>
#include <vector>

#include "common/tokenizer.h"

namespace lockstep {

struct Language {
  std::optional<Tokenizer> tokenizer;
  std::string description = "none: ids";

  std::vector<int32_t> read(const std::string& text) const;  // with what stands before every text
  std::string write(int32_t id) const;
};

// From `file` (a tokenizer.json), else from the one in the folder `beside`, else bytes if the
// model's vocabulary is that of bytes. Either may be empty.
Language find_language(const std::filesystem::path& file, const std::filesystem::path& beside,
                       int64_t model_vocab);

}  // namespace lockstep
