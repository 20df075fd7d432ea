#pragma once
// The shape of a Llama-style model. Names in brackets are Hugging Face's, as in config.json.

#include <cmath>
#include <cstdint>
#include <string>

namespace lockstep {

struct ModelConfig {
  int64_t layers = 4;           // L   [num_hidden_layers]
  int64_t hidden = 128;         // H   [hidden_size]
  int64_t heads = 4;            //     [num_attention_heads]
  int64_t kv_heads = 4;         //     [num_key_value_heads]: heads (MHA), fewer (GQA) or 1 (MQA)
  int64_t head_dim = 32;        // D   [head_dim]
  int64_t ffn = 384;            // F   [intermediate_size]
  int64_t vocab = 256;          // V   [vocab_size]
  int64_t max_length = 0;       //     [max_position_embeddings]; 0: no limit (RoPE knows none)
  double rope_theta = 10000;    //     [rope_theta, or rope_parameters.rope_theta]
  double norm_epsilon = 1e-5;   //     [rms_norm_eps]
  double init_std = 0.02;       //     [initializer_range]
  double dropout = 0;           // after the embedding, the attention and the feed-forward block
  bool tied = false;            //     [tie_word_embeddings]: the head reads the embedding's table
  bool attention_bias = false;  //     [attention_bias]: on q, k, v and o
  bool mlp_bias = false;        //     [mlp_bias]: on gate, up and down

  int64_t q_size() const { return heads * head_dim; }
  int64_t kv_size() const { return kv_heads * head_dim; }
  // What is added to the stream 2L times starts smaller, so that the sum starts at the scale of
  // one: Radford et al., "Language models are unsupervised multitask learners" (2019), section 2.3.
  double residual_std() const { return init_std / std::sqrt(2.0 * double(layers)); }

  // One sentence about the first thing that cannot work, through require().
  void validate() const;
  // Weights in all, counted from the formula (the tests compare it with the built model).
  int64_t parameters() const;
};

std::string divisors(int64_t n);  // "1, 2, 4": what divides n, for sentences

}  // namespace lockstep
