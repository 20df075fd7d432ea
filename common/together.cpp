#include "common/together.h"

namespace lockstep {

std::vector<std::string> together(Communicator* world, const std::function<std::string()>& part) {
  if (!world) return {part()};
  std::string answer;
  try {
    answer = text("+", part());
  } catch (const std::exception& e) {
    answer = text("-", e.what());
  }
  std::vector<std::string> answers = world->gather_texts(answer);
  for (size_t r = 0; r < answers.size(); ++r) {
    require(answers[r][0] == '+', "on rank ", r, ": ", answers[r].substr(1));
    answers[r].erase(0, 1);
  }
  return answers;
}

}  // namespace lockstep
