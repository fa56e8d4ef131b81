// A cluster for the page: `baton up`, and load on it.

import { spawn } from "node:child_process";

/** Starts a cluster; gives the addresses that it prints, and how to stop it. */
export async function up(baton, model, flags = []) {
  const free = ["--http", "--grpc", "--internal", "--admin"].flatMap((flag) => [flag, "127.0.0.1:0"]);
  const env = { ...process.env, BATON_LOCAL_PREFILL: "1", BATON_LOCAL_PROMPT: "0" };
  const child = spawn(baton, ["up", "--model", model, "--prefill", "2", "--decode", "2", ...free, ...flags], { env, stdio: ["ignore", "pipe", "inherit"] });
  let text = "";
  await new Promise((resolve, reject) => {
    child.stdout.on("data", (part) => {
      text += part;
      if (text.includes("Ctrl-C stops everything")) resolve();
    });
    child.on("exit", (code) => reject(new Error(`baton up ended with ${code}`)));
  });
  const find = (pattern) => text.match(pattern)?.[1] ?? (() => { throw new Error(`baton up does not print ${pattern}`); })();
  const stop = () => new Promise((resolve) => (child.on("exit", resolve), child.kill("SIGINT")));
  return { page: find(/The cluster live: (\S+)/), http: find(/curl -N (http:\/\/[^/]+)/), model: find(/serving (\S+)/), stop };
}

/** Keeps `many` requests running until it is ended. Gives the id of one that has ended. */
export function load({ http, model }, many) {
  let on = true;
  let last = null;
  const one = async (at) => {
    for (let round = 0; on; round++) {
      const words = Array.from({ length: 40 + 30 * (at % 3) }, (_, word) => `word${at * 7 + word}`).join(" ");
      const body = { model, max_tokens: 24 + 8 * at, temperature: 0, ignore_eos: true, messages: [{ role: "system", content: "Be brief and kind." }, { role: "user", content: `${round} ${words}` }] };
      const answer = await fetch(`${http}/v1/completions`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ model, max_tokens: body.max_tokens, temperature: 0, prompt: `${round} ${words}` }) });
      await answer.text();
      if (answer.ok) last = answer.headers.get("x-request-id");
      else await new Promise((resolve) => setTimeout(resolve, 200));
    }
  };
  const all = Promise.all(Array.from({ length: many }, (_, at) => one(at)));
  return { id: () => last, end: async () => ((on = false), await all, last) };
}
