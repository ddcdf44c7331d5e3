#!/bin/sh
# LLaMA-Factory's command for BAdam, word by word, and then what its users read of the run: each file
# by the tools that they have. Usage: reference_run.sh MODEL DATA OUT, with SUREFOOT as the program.
set -eu
MODEL=$1 DATA=$2 OUT=$3

$SUREFOOT train --stage sft --do_train True --model_name_or_path "$MODEL" \
    --preprocessing_num_workers 16 --finetuning_type full --template qwen --flash_attn auto \
    --dataset_dir "$DATA" --dataset alpaca_zh --cutoff_len 1024 --learning_rate 5e-05 \
    --num_train_epochs 3.0 --max_samples 1000 --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 --lr_scheduler_type cosine --max_grad_norm 1.0 \
    --logging_steps 5 --save_steps 100 --warmup_steps 0 --optim adamw_torch --packing False \
    --report_to none --use_badam True --output_dir "$OUT" --fp16 True --plot_loss True \
    --ddp_timeout 180000000 --include_num_input_tokens_seen True --badam_mode layer \
    --badam_switch_mode ascending --badam_switch_interval 50 --badam_update_ratio 0.05 \
    --val_size 0.1 --eval_strategy steps --eval_steps 100 --per_device_eval_batch_size 2

cd "$OUT"
has() { # FILE KEY...: every key is in the JSON of the file
    file=$1 && shift
    for key in "$@"; do grep -q "\"$key\": " "$file" || { echo "$file: no $key" && exit 1; }; done
}
head -n 1 trainer_log.jsonl > first && has first current_steps total_steps loss lr epoch \
    percentage elapsed_time remaining_time throughput total_tokens
tail -n 1 trainer_log.jsonl > last && has last eval_loss
grep -q '"percentage": 100.0, .*"remaining_time": "0:00:00"' last
train="epoch total_flos train_loss train_runtime train_samples_per_second train_steps_per_second"
evaluation="epoch eval_loss eval_runtime eval_samples_per_second eval_steps_per_second"
has train_results.json $train num_input_tokens_seen
has eval_results.json $evaluation
has all_results.json $train $evaluation
has trainer_state.json log_history global_step
for picture in training_loss.png training_eval_loss.png; do
    head -c 4 $picture | tail -c 3 | grep -q PNG
done
grep -q "data.datasets.: .alpaca_zh." README.md
grep -q '"eos_token": "<|im_end|>"' tokenizer_config.json
ls model*.safetensors config.json generation_config.json tokenizer.json chat_template.jinja \
    checkpoint-*/model*.safetensors > read
