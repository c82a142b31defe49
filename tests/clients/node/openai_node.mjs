// openai-node, as a program: see tests/clients/programs.py.

import { createInterface } from "node:readline";

import OpenAI from "openai";

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);

function count(seen) {
  if (seen.chunks === 0) say({ begun: true });
  seen.chunks += 1;
}

async function askChat(client, body, seen) {
  let answer;
  if (body.stream) {
    const stream = client.chat.completions.stream(body);
    stream.on("chunk", () => count(seen));
    answer = await stream.finalChatCompletion();
  } else {
    answer = await client.chat.completions.create(body);
  }
  for (const choice of answer.choices) {
    const tokens = (choice.logprobs?.content ?? []).map((one) => one.token);
    seen.choices.push({ text: choice.message.content, tokens, finish_reason: choice.finish_reason });
  }
  return answer.usage;
}

async function askCompletions(client, body, seen) {
  const answer = await client.completions.create(body);
  const found = [];
  let usage;
  const add = (chunk) => {
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      const shown = (found[choice.index] ??= { text: "", tokens: [], finish_reason: null });
      shown.text += choice.text;
      shown.tokens.push(...(choice.logprobs?.tokens ?? []));
      shown.finish_reason = choice.finish_reason ?? shown.finish_reason;
    }
  };
  if (body.stream) {
    for await (const chunk of answer) {
      count(seen);
      add(chunk);
    }
  } else {
    add(answer);
  }
  seen.choices = found;
  return usage;
}

for await (const line of createInterface({ input: process.stdin })) {
  const { url, api, body, extra } = JSON.parse(line);
  const seen = { choices: [], chunks: 0, usage: null, status: 200, error: "" };
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  try {
    const usage = await (api === "chat" ? askChat : askCompletions)(client, { ...body, ...extra }, seen);
    seen.usage = usage ? [usage.prompt_tokens, usage.completion_tokens] : null;
  } catch (error) {
    seen.error = `${error.constructor.name}: ${error.message}`;
    seen.status = error.status ?? 0;
  }
  say(seen);
}
