#include "common/svg.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "common/check.h"

namespace lockstep::svg {

namespace {

constexpr double kWidth = 860, kHeight = 420, kLeft = 90, kRight = 190, kTop = 46, kBottom = 60;
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;

// Seven colours that stay apart for colour-blind readers (Okabe and Ito, 2008).
const char* colour(size_t i) {
  static const char* const kColours[] = {"#0072B2", "#E69F00", "#009E73", "#CC79A7",
                                         "#56B4E9", "#D55E00", "#F0E442"};
  return kColours[i % std::size(kColours)];
}

std::string escaped(const std::string& plain) {
  std::string out;
  for (char c : plain) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

std::string words(double x, double y, const std::string& what, const char* anchor = "start",
                  double size = 12) {
  return text("<text x=\"", x, "\" y=\"", y, "\" text-anchor=\"", anchor, "\" font-size=\"", size,
              "\">", escaped(what), "</text>\n");
}

std::string box(double x, double y, double width, double height, const char* fill,
                double opacity = 1) {
  return text("<rect x=\"", x, "\" y=\"", y, "\" width=\"", width, "\" height=\"", height,
              "\" fill=\"", fill, opacity < 1 ? text("\" fill-opacity=\"", opacity) : "", "\"/>\n");
}

std::string line(double x1, double y1, double x2, double y2, const char* stroke) {
  return text("<line x1=\"", x1, "\" y1=\"", y1, "\" x2=\"", x2, "\" y2=\"", y2, "\" stroke=\"",
              stroke, "\"/>\n");
}

std::string short_number(double value) {
  char out[32];
  std::snprintf(out, sizeof out, "%.4g", value);
  return out;
}

// 1, 2 or 5 times a power of ten, so that about five steps reach `highest`.
double grid_step(double highest) {
  double rough = highest / 5, power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0})
    if (rough <= factor * power) return factor * power;
  return 10 * power;
}

double height_of(double value, double highest) { return value / highest * kPlotHeight; }

std::string frame(const std::string& title, const std::string& unit, double highest,
                  const std::vector<std::string>& legend) {
  std::string out =
      text("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", kWidth, "\" height=\"", kHeight,
           "\" font-family=\"sans-serif\">\n", box(0, 0, kWidth, kHeight, "white"));
  out += words(kLeft, 26, title, "start", 16);
  out += words(12, kTop - 6, unit);
  double step = grid_step(highest);
  for (double value = 0; value <= highest * 1.0001; value += step) {
    double y = kTop + kPlotHeight - height_of(value, highest);
    out += line(kLeft, y, kLeft + kPlotWidth, y, "#dddddd");
    out += words(kLeft - 6, y + 4, short_number(value), "end");
  }
  for (size_t i = 0; i < legend.size(); ++i) {
    double y = kTop + 20 * double(i);
    out += box(kLeft + kPlotWidth + 14, y, 12, 12, colour(i));
    out += words(kLeft + kPlotWidth + 32, y + 11, legend[i]);
  }
  return out;
}

}  // namespace

std::string draw(const Bars& b) {
  double highest = 1e-9;
  for (const auto& bar : b.values) {
    double sum = 0;
    for (double v : bar) sum += v;
    highest = std::max(highest, sum);
  }
  std::string out = frame(b.title, b.unit, highest, b.parts);
  double slot = kPlotWidth / double(std::max<size_t>(1, b.values.size()));
  for (size_t i = 0; i < b.values.size(); ++i) {
    double x = kLeft + slot * (double(i) + 0.15), base = kTop + kPlotHeight, sum = 0;
    for (size_t k = 0; k < b.values[i].size(); ++k) {
      double height = height_of(b.values[i][k], highest);
      base -= height;
      sum += b.values[i][k];
      out += box(x, base, 0.7 * slot, height, colour(k));
    }
    double middle = x + 0.35 * slot;
    out += words(middle, base - 4, short_number(sum), "middle");
    out += words(middle, kTop + kPlotHeight + 18, b.bars[i], "middle");
  }
  return out + "</svg>\n";
}

std::string draw(const Lines& l) {
  size_t points = l.x.size();
  require(points > 0, "a chart of lines needs at least one point");
  std::vector<std::vector<double>> top = l.values;  // of each line, or of each area
  if (l.stacked)
    for (size_t k = 1; k < top.size(); ++k)
      for (size_t i = 0; i < points; ++i) top[k][i] += top[k - 1][i];
  double highest = 1e-9, first = l.x.front(), span = std::max(1e-12, l.x.back() - first);
  for (const auto& values : top)
    highest = std::max(highest, *std::max_element(values.begin(), values.end()));

  std::string out = frame(l.title, l.unit, highest, l.lines);
  auto at = [&](size_t i, double value) {
    return text(kLeft + (l.x[i] - first) / span * kPlotWidth, ",",
                kTop + kPlotHeight - height_of(value, highest), " ");
  };
  for (size_t k = top.size(); k-- > 0;) {  // the lowest area is drawn last, over the others
    std::string path;
    for (size_t i = 0; i < points; ++i) path += at(i, top[k][i]);
    if (l.stacked) {
      path += at(points - 1, 0) + at(0, 0);
      out += text("<polygon points=\"", path, "\" fill=\"", colour(k), "\"/>\n");
    } else {
      out += text("<polyline points=\"", path, "\" fill=\"none\" stroke-width=\"2\" stroke=\"",
                  colour(k), "\"/>\n");
    }
  }
  for (size_t i = 0; i < l.marks.size(); ++i) {  // words of neighbours at different heights
    double x = kLeft + (l.marks[i].x - first) / span * kPlotWidth;
    bool right = x > kLeft + 0.8 * kPlotWidth;
    out += line(x, kTop, x, kTop + kPlotHeight, "#888888");
    out += words(x + (right ? -3 : 3), kTop + 12 + 14 * double(i % 4), l.marks[i].text,
                 right ? "end" : "start", 11);
  }
  for (size_t i = 0; i < l.x_names.size(); ++i)
    out += words(kLeft + (l.x[i] - first) / span * kPlotWidth, kTop + kPlotHeight + 18,
                 l.x_names[i], "middle");
  out += words(kLeft + kPlotWidth / 2, kHeight - 16, l.x_label, "middle");
  return out + "</svg>\n";
}

std::string draw(const Lanes& l) {
  constexpr double kLane = 24, kGroup = 30, kWordWidth = 7;
  double last = 1e-9, height = kTop + 10 + kBottom;
  for (const Lanes::Lane& lane : l.lanes) {
    height += kLane + (lane.group.empty() ? 0 : kGroup);
    for (const Lanes::Box& b : lane.boxes) last = std::max(last, b.end);
  }
  double width = kWidth + 340, plot = width - kLeft - kRight, bottom = height - kBottom;
  std::string out = text("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width,
                         "\" height=\"", height, "\" font-family=\"sans-serif\">\n",
                         box(0, 0, width, height, "white"), words(kLeft, 26, l.title, "start", 16));
  auto x = [&](double time) { return kLeft + time / last * plot; };
  for (double time = 0; time <= last * 1.0001; time += grid_step(last)) {
    out += line(x(time), kTop, x(time), bottom, "#dddddd");
    out += words(x(time), bottom + 18, short_number(time), "middle");
  }
  double y = kTop;
  for (const Lanes::Lane& lane : l.lanes) {
    if (!lane.group.empty()) out += words(kLeft, (y += kGroup) - 8, lane.group, "start", 13);
    out += words(kLeft - 8, y + 15, lane.name, "end");
    out += words(kLeft + plot + 10, y + 15, lane.note);
    for (const Lanes::Box& b : lane.boxes) {
      double from = x(b.begin), size = x(b.end) - from;
      out += box(from, y + 1, std::max(0.3, size - 0.6), kLane - 4, colour(b.part),
                 b.faint ? 0.55 : 1);
      if (size > kWordWidth * double(b.word.size()) + 2)
        out += words(from + size / 2, y + 15, b.word, "middle", 11);
    }
    y += kLane;
  }
  for (size_t i = 0; i < l.parts.size(); ++i) {
    double left = kLeft + 150 * double(i);
    out += box(left, height - 26, 12, 12, colour(i)) + words(left + 18, height - 16, l.parts[i]);
  }
  return out + words(kLeft + plot, height - 16, l.unit, "end") + "</svg>\n";
}

void save(const std::filesystem::path& path, const std::string& picture) {
  std::ofstream file(path);
  file << picture;
  file.close();
  require(file.good(), "the picture ", path.string(), " cannot be written");
}

}  // namespace lockstep::svg
