#include "common/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "common/device.h"
#include "common/json.h"

namespace lockstep {

// The whole text as a number, or nothing.
template <class T>
static bool read_number(const std::string& text, T& value) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

static CLI::Option* checked(CLI::Option* option, std::function<bool(const std::string&)> good,
                            std::string wanted) {
  return option->check(CLI::Validator(
      [good, wanted](std::string& value) {
        return good(value) ? std::string() : text("'", value, "' is not ", wanted);
      },
      ""));
}

CLI::Option* whole(CLI::Option* option, int64_t low, int64_t high) {
  auto good = [=](const std::string& value) {
    int64_t number = 0;
    return read_number(value, number) && number >= low && number <= high;
  };
  return checked(option, good, text("a whole number from ", low, " to ", high));
}

CLI::Option* real(CLI::Option* option, double low, double high, bool open) {
  auto good = [=](const std::string& value) {  // NaN fails every comparison
    double number = 0;
    return read_number(value, number) && (open ? number > low : number >= low) && number <= high;
  };
  return checked(
      option, good,
      text("a number ", open ? "above " : "from ", low, open ? ", at most " : " to ", high));
}

CLI::Option* word(CLI::Option* option, const std::vector<std::string>& words) {
  std::string list;
  for (size_t i = 0; i < words.size(); ++i)
    list += (i == 0 ? "" : i + 1 < words.size() ? ", " : " or ") + words[i];
  auto good = [words](const std::string& value) {
    return std::find(words.begin(), words.end(), value) != words.end();
  };
  return checked(option, good, list);
}

static constexpr const char* kOutputFile = "FILE";

CLI::Option* output_file(CLI::Option* option) {
  auto good = [](const std::string& path) {
    bool was_there = std::filesystem::exists(path);
    bool opens = std::ofstream(path, std::ios::app).is_open();
    if (opens && !was_there) std::filesystem::remove(path);
    return opens;
  };
  return checked(option->type_name(kOutputFile), good, "a file that can be written");
}

// The second of two outputs would take the first one's place.
static void refuse_one_file_twice(const CLI::App& app) {
  std::map<std::filesystem::path, std::string> flags;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_type_name() != kOutputFile || option->count() == 0) continue;
    std::string path = option->results().back();
    auto [other, first] = flags.emplace(
        std::filesystem::weakly_canonical(std::filesystem::absolute(path)), option->get_name());
    if (!first)
      throw UsageError(text(other->second, " and ", option->get_name(), " both write ", path,
                            ": name two files"));
  }
}

namespace {

class JsonConfig : public CLI::Config {
 public:
  explicit JsonConfig(const CLI::App& app) : app_(app) {}
  std::string to_config(const CLI::App*, bool, bool, std::string) const override { return ""; }
  std::vector<CLI::ConfigItem> from_config(std::istream& in) const override {
    std::string content(std::istreambuf_iterator<char>(in), {});
    nlohmann::json settings = parse_json(content, "the --config file");
    require(settings.is_object(), "the --config file must hold one JSON object");
    std::vector<CLI::ConfigItem> items;
    for (const auto& [key, value] : settings.items()) {
      if (!app_.get_option_no_throw("--" + key))
        throw UsageError(text("the --config file has the unknown setting \"", key, "\""));
      require(!value.is_structured(), "the setting \"", key, "\" of the --config file must be a ",
              "number, a text or true/false");
      CLI::ConfigItem item;
      item.name = key;
      item.inputs = {value.is_string() ? value.get<std::string>() : number(value)};
      items.push_back(item);
    }
    return items;
  }

 private:
  // 256.0 and 1e2 are whole numbers too, to JSON.
  static std::string number(const nlohmann::json& value) {
    if (!value.is_number_float()) return value.dump();
    double x = value.get<double>();
    return std::floor(x) == x && std::abs(x) < 1e15 ? std::to_string(int64_t(x)) : value.dump();
  }
  const CLI::App& app_;
};

}  // namespace

void add_config_file(CLI::App& app) {
  app.config_formatter(std::make_shared<JsonConfig>(app));
  app.set_config("--config", "", "JSON file with any of these settings");
  app.allow_config_extras(CLI::config_extras_mode::error);
}

bool parse_flags(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::ParseError& e) {
    std::string sentence = e.what();
    std::replace(sentence.begin(), sentence.end(), '\n', ' ');
    throw UsageError(sentence + " (--help lists all flags)");
  }
  refuse_one_file_twice(app);
  return true;
}

std::string why_no_gpu(const std::string& name) {
  return name == "auto" && !device::available() ? device::why_not() : "";
}

Device choose_device(const std::string& name) {
  bool gpu = name != "cpu" && device::available();
  require(gpu || name != "cuda", "--device cuda: ",
          device::why_not().empty() ? "this program was built without CUDA" : device::why_not());
  return gpu ? Device::CUDA : Device::CPU;
}

DType choose_type(const std::string& name, Device device) {
  if (name.empty()) return device == Device::CUDA ? DType::BF16 : DType::F32;
  return name == "bf16" ? DType::BF16 : DType::F32;
}

int run_main(int argc, char** argv, const std::function<int(int, char**)>& body) {
  std::string sentence;
  try {
    int status = body(argc, argv);
    std::cout.flush();
    if (std::fflush(stdout) == 0 && std::cout.good()) return status;
    sentence = "the output could not be written";
  } catch (const UsageError& e) {
    sentence = e.what();
  } catch (const Error& e) {
    sentence = text(e.what(), "  [", e.where.file_name(), ":", e.where.line(), "]");
  } catch (const std::exception& e) {
    sentence = e.what();
  }
  std::cout.flush();
  std::cerr << "error: " << sentence << "\n";
  return 1;
}

}  // namespace lockstep
