// Schedules as data: which are valid, what they hold, what they refuse. Nothing runs here.

#include <gtest/gtest.h>

#include "06_pipeline_parallel/schedules.h"
#include "06_pipeline_parallel/validate.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

TEST(PipelineSchedule, EveryScheduleIsValidOrRefusedWithItsRule) {
  int valid = 0, refused = 0;
  for (const std::string& name : schedule_names())
    for (int p : {1, 2, 4, 8})
      for (int m : {1, 2, 3, 4, 8, 16}) {
        SCOPED_TRACE(text(name, " p ", p, " m ", m));
        bool too_few = name == "dualpipe-v" && m < 2 * p;
        bool uneven = name == "interleaved" && m % p != 0;
        if (too_few || uneven) {
          expect_refusal([&] { make_schedule(name, p, 0, m); },
                         {text(p, " ranks"), text(m, too_few ? "" : " micro-batches")});
          ++refused;
          continue;
        }
        Pipeline pipeline = make_schedule(name, p, 0, m);
        EXPECT_NO_THROW(validate(pipeline.schedule, pipeline.placement, m));
        ++valid;
      }
  printf("%d %d\n", valid, refused);
}

}  // namespace
}  // namespace lockstep
