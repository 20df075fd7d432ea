#include "common/together.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

std::vector<std::string> gather_texts(Communicator& world, Device device, const std::string& mine) {
  Tensor length = Tensor::from<int64_t>({int64_t(mine.size())}, {1}, device, Category::Buffers);
  Tensor all_lengths = Tensor::empty({world.size()}, DType::I64, device, Category::Buffers);
  world.all_gather(length, all_lengths).wait();
  const std::vector<int64_t> lengths = all_lengths.values<int64_t>();

  // Everyone sends as many letters as the longest text has.
  const int64_t room = *std::max_element(lengths.begin(), lengths.end());
  Tensor letters = Tensor::zeros({room}, DType::U8, Device::CPU, Category::Buffers);
  if (!mine.empty()) std::memcpy(letters.raw(), mine.data(), mine.size());
  letters = letters.to(device, Category::Buffers);
  Tensor all = Tensor::empty({world.size() * room}, DType::U8, device, Category::Buffers);
  world.all_gather(letters, all).wait();

  const std::vector<uint8_t> bytes = all.values<uint8_t>();
  std::vector<std::string> texts;
  for (int r = 0; r < world.size(); ++r) {
    auto begin = bytes.begin() + r * room;
    texts.emplace_back(begin, begin + lengths[size_t(r)]);
  }
  return texts;
}

std::vector<std::string> together(Communicator* world, Device device,
                                  const std::function<std::string()>& part) {
  if (!world) return {part()};
  std::string answer;
  try {
    answer = text("+", part());
  } catch (const std::exception& e) {
    answer = text("-", e.what());
  }
  std::vector<std::string> answers = gather_texts(*world, device, answer);
  for (size_t r = 0; r < answers.size(); ++r) {
    require(answers[r][0] == '+', "on rank ", r, ": ", answers[r].substr(1));
    answers[r].erase(0, 1);
  }
  return answers;
}

}  // namespace lockstep
