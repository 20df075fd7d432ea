#include "common/strategy.h"

namespace lockstep {

Tensor master_of(const Tensor& value) {
  DType exact = sum_type(value.dtype());
  if (exact == value.dtype()) return value;
  return Tensor::empty(value.shape(), exact, value.device(), Category::Master);
}

// One tensor per group: each parameter of the group is a view of its part.
static void allocate_group(const Weights& group, DType dtype, Device device, Category category,
                           const std::function<void(Parameter&, Tensor)>& give) {
  int64_t total = 0, first = 0;
  for (Parameter* p : group) total += p->size();
  Tensor memory = Tensor::empty({total}, dtype, device, category);
  for (Parameter* p : group) {
    give(*p, memory.flat(first, p->size()).view(p->shard.local));
    first += p->size();
  }
}

DType DataParallel::gradient_type(const Stage& stage) const {
  return stage.compute() == DType::F64 ? DType::F64 : settings_.gradients;
}

void DataParallel::allocate_values() {
  for (Stage* stage : chunks_)
    for (Unit* unit : stage->units())
      for (const Weights& group : unit->groups)
        allocate_group(group, stage->compute(), stage->device(), Category::Weights,
                       [](Parameter& p, Tensor t) { p.value = t; });
}

void DataParallel::allocate_gradients() {
  for (Stage* stage : chunks_)
    for (Unit* unit : stage->units())
      for (const Weights& group : unit->groups)
        allocate_group(group, gradient_type(*stage), stage->device(), Category::Gradients,
                       [](Parameter& p, Tensor t) { p.grad = t; });
}

void DataParallel::allocate() {
  allocate_values();
  allocate_gradients();
  for (Stage* stage : chunks_) {
    for (Parameter* p : stage->parameters())
      owned_.push_back({p, 0, p->value, master_of(p->value), p->grad, counts(*p, owned_.size())});
  }
}

void DataParallel::begin_step(int64_t) {
  for (const Owned& o : owned_) zero(o.grad);
}

static void publish_value(const Owned& o) {
  if (o.value.raw() != o.master.raw()) on(o.value).cast(o.value, o.master);
}

void initialise(const std::vector<Owned>& owned, uint64_t seed) {
  for (const Owned& o : owned) {
    const Parameter& p = *o.parameter;
    if (p.init.kind == Init::Normal) {
      RandomStream stream(seed, p.name);
      on(o.master).fill_normal(o.master, float(p.init.std), stream, p.shard.index_map(), o.first);
    } else {
      on(o.master).fill(o.master, p.init.kind == Init::Ones ? 1 : 0);
    }
    publish_value(o);
  }
}

void assign(const Owned& o, const Tensor& local) {
  require(local.size() == o.parameter->size(), o.parameter->name, " has ", o.parameter->size(),
          " elements here, ", local.size(), " were given");
  Tensor part = local.flat(o.first, o.master.size());
  Tensor host = part;
  if (part.dtype() != o.master.dtype()) {
    host = Tensor::empty(part.shape(), o.master.dtype(), Device::CPU);
    on(host).cast(host, part);
  }
  copy(o.master, host);
  publish_value(o);
}

}  // namespace lockstep
