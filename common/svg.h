#pragma once
// Small pictures for the programs that measure: bars and lines, written as SVG, which every browser
// opens. Not a plotting library: three kinds of chart, one look.

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::svg {

// Stacked bars. values[bar][part]; a legend names the parts.
struct Bars {
  std::string title, unit;
  std::vector<std::string> bars, parts;
  std::vector<std::vector<double>> values;
};
std::string draw(const Bars& bars);

// Lines, or areas stacked on each other. x is shared; values[line][i] belongs to x[i].
struct Lines {
  std::string title, x_label, unit;
  std::vector<std::string> lines;
  std::vector<double> x;
  std::vector<std::vector<double>> values;
  bool stacked = false;
  struct Mark {
    double x;
    std::string text;
  };
  std::vector<Mark> marks;                // vertical lines with a word
  std::vector<std::string> x_names = {};  // of the points, written below the axis
};
std::string draw(const Lines& lines);

// Who does what when: a lane for each, boxes along one axis of time, which begins at 0.
struct Lanes {
  struct Box {
    double begin, end;
    size_t part;       // its colour
    bool faint;        // a lighter shade of it
    std::string word;  // inside, where there is room
  };
  struct Lane {
    std::string group;       // not empty: begins a new group of lanes, under this name
    std::string name, note;  // on its left, on its right
    std::vector<Box> boxes;
  };
  std::string title, unit;
  std::vector<std::string> parts;
  std::vector<Lane> lanes;
};
std::string draw(const Lanes& lanes);

void save(const std::filesystem::path& path, const std::string& picture);

}  // namespace lockstep::svg
