{{/* What only KV stores have: settings that they share with workers, memory by the size of what they keep, and a disk. */}}

{{- define "baton.kvDiskPath" -}}/var/lib/baton/kv{{- end -}}

{{/* Settings of `workers.config` that a store has, too: what both ends of a transfer have to agree on, and what is of every process. The others
are about what workers compute, or about memory, of which a store has its own. Takes the root. */}}
{{- define "baton.kvStoreShared" -}}
{{- $shared := list "kv_type" "quantization" "block_size" "attention_window" "attention_sinks" -}}
{{- $shared = concat $shared (list "registry_ttl" "transport" "ucx_library" "ucx_options" "tcp_connections") -}}
{{- $shared = concat $shared (list "transfer_heartbeat" "transfer_silence" "transfer_sessions") -}}
{{- $shared = concat $shared (list "tls" "tls_cert" "tls_key" "tls_ca" "admin_token_file" "otlp_endpoint" "otlp_sample") -}}
{{- $settings := dict -}}
{{- range $key, $value := .Values.workers.config -}}
  {{- if has $key $shared -}}
    {{- $_ := set $settings $key $value -}}
  {{- end -}}
{{- end -}}
{{- /* KV of so many ranks; checked to be the same for all. */ -}}
{{- $tp := (include "baton.settings" (dict "root" . "role" "decode") | fromYaml).tp -}}
{{- if $tp -}}
  {{- $_ := set $settings "tp" $tp -}}
{{- end -}}
{{- with include "baton.kvDiskBytes" . -}}
  {{- $_ := set $settings "kv_disk_size" (printf "%dMiB" (div (mul . 9) 10485760)) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Bytes of a size in the words of Kubernetes (100Gi) or of the binary (100GiB). Takes the text. */}}
{{- define "baton.bytes" -}}
{{- if kindIs "string" . -}}
  {{- $number := regexFind "^[0-9.]+" . -}}
  {{- $unit := trimPrefix $number . | trimSuffix "B" -}}
  {{- $factors := dict "" 1 "k" 1000 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
  {{- $factors = merge $factors (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) -}}
  {{- mulf (float64 $number) (get $factors $unit) | floor | int64 -}}
{{- else -}}
  {{- int64 . -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a store's disk; empty: it has none. Takes the root. */}}
{{- define "baton.kvDiskBytes" -}}
{{- with .Values.kvStore.disk.size -}}{{- include "baton.bytes" . -}}{{- end -}}
{{- end -}}

{{/* Bytes of memory that a store needs: its pool, the host memory below it, 4 KiB for each MiB on disk and in the object store, to know what is
there, and what the process itself takes. Takes the root. */}}
{{- define "baton.kvStoreBytes" -}}
{{- $config := .Values.kvStore.config -}}
{{- $bytes := int64 (include "baton.bytes" ($config.kv_memory | default "1GiB")) -}}
{{- $bytes = add $bytes (include "baton.bytes" ($config.kv_host | default "0B")) -}}
{{- $below := int64 (include "baton.kvDiskBytes" . | default 0) -}}
{{- if $config.kv_object -}}
  {{- $below = add $below (include "baton.bytes" ($config.kv_object_size | default "100GiB")) -}}
{{- end -}}
{{- add $bytes (div $below 256) 536870912 -}}
{{- end -}}

{{/* Its resources: memory as it needs it, unless the values say how much. Takes the root. */}}
{{- define "baton.kvStoreResources" -}}
{{- $memory := printf "%dMi" (div (add (include "baton.kvStoreBytes" .) 1048575) 1048576) -}}
{{- $resources := deepCopy .Values.kvStore.resources -}}
{{- $limit := ($resources.limits | default dict).memory | default $memory -}}
{{- $resources = merge $resources (dict "requests" (dict "memory" $memory) "limits" (dict "memory" $limit)) -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The volume of a store's disk, but for claims, which the StatefulSet makes. Takes the root. */}}
{{- define "baton.kvDiskVolume" -}}
{{- $disk := .Values.kvStore.disk -}}
{{- if eq $disk.type "emptyDir" -}}
emptyDir: {sizeLimit: {{ $disk.size | quote }}}
{{- else if eq $disk.type "existing" -}}
persistentVolumeClaim: {claimName: {{ $disk.existing.claimName }}}
{{- else -}}
hostPath: {path: {{ $disk.hostPath.path | quote }}, type: DirectoryOrCreate}
{{- end -}}
{{- end -}}

{{/* Rules between the values of stores and others. Takes the root. */}}
{{- define "baton.kvStoreChecks" -}}
{{- $store := .Values.kvStore -}}
{{- $disk := $store.disk -}}
{{- $host := int64 (include "baton.bytes" ($store.config.kv_host | default "0B")) -}}
{{- if and (ne $disk.type "emptyDir") (not $disk.size) -}}
  {{- fail (printf "kvStore.disk.type is %s, but kvStore.disk.size is empty; say how large the disk is, or leave the type out" $disk.type) -}}
{{- end -}}
{{- range $type, $named := dict "existing" $disk.existing.claimName "hostPath" $disk.hostPath.path -}}
  {{- $field := eq $type "existing" | ternary "existing.claimName" "hostPath.path" -}}
  {{- if and (eq $disk.type $type) (not $named) -}}
    {{- fail (printf "kvStore.disk.type is %s, but kvStore.disk.%s is empty; name yours there" $type $field) -}}
  {{- end -}}
  {{- if and $named (ne $disk.type $type) -}}
    {{- fail (printf "kvStore.disk.%s is set, but kvStore.disk.type is %s; set that to %s to use it" $field $disk.type $type) -}}
  {{- end -}}
{{- end -}}
{{- range $what, $set := dict "kvStore.disk.size" $disk.size "kvStore.config.kv_object" $store.config.kv_object -}}
  {{- if and $set (not $host) -}}
    {{- fail (printf "%s is set, but kvStore.config.kv_host is 0B, and blocks pass through that memory; set it to 1GiB or more" $what) -}}
  {{- end -}}
{{- end -}}
{{- if and $store.config.kv_object_size (not $store.config.kv_object) -}}
  {{- fail "kvStore.config.kv_object_size is set, but kvStore.config.kv_object is not; name the object store there" -}}
{{- end -}}
{{- range $kind, $resources := pick $store.resources "requests" "limits" -}}
  {{- if hasKey $resources "nvidia.com/gpu" -}}
    {{- fail (printf "kvStore.resources.%s has nvidia.com/gpu, but a store computes nothing; take it out" $kind) -}}
  {{- end -}}
  {{- $least := int64 (include "baton.kvStoreBytes" $) -}}
  {{- if and $resources.memory (lt (int64 (include "baton.bytes" $resources.memory)) $least) -}}
    {{- fail (printf "kvStore.resources.%s.memory is %v, but what config and disk say needs %dMi; raise it, or leave it out" $kind $resources.memory (div (add $least 1048575) 1048576)) -}}
  {{- end -}}
{{- end -}}
{{- include "baton.computedByCheck" . -}}
{{- end -}}

{{/* A store exchanges KV only with workers whose bits are the same: it must know what computes them. Takes the root. */}}
{{- define "baton.computedByCheck" -}}
{{- $config := .Values.kvStore.config -}}
{{- $computed := list -}}
{{- $ranks := list -}}
{{- range $role := list "prefill" "decode" -}}
  {{- $c := get $.Values $role -}}
  {{- $scope := dict "root" $ "role" $role -}}
  {{- if or $c.autoscaling.enabled (gt (int $c.replicas) 0) -}}
    {{- $computed = append $computed (include "baton.onGpus" $scope | empty | ternary "cpu" "cuda") -}}
    {{- $ranks = append $ranks (int ((include "baton.settings" $scope | fromYaml).tp | default 1)) -}}
  {{- end -}}
{{- end -}}
{{- $by := $config.computed_by | default "" -}}
{{- if and (not $by) (has "cuda" $computed) -}}
  {{- fail "kvStore.enabled is true and workers compute on GPUs, but kvStore.config.computed_by is empty; set it to their backend, as their log names it at `model loaded`" -}}
{{- end -}}
{{- if and $by (not (has (contains "cuda" $by | ternary "cuda" "cpu") $computed)) -}}
  {{- fail (printf "kvStore.config.computed_by is %q, but prefill and decode compute on %s, so stores would keep nothing; set it to what computes" $by (first $computed | eq "cpu" | ternary "the CPU" "GPUs")) -}}
{{- end -}}
{{- if and (not $config.tp) (gt (len (uniq $ranks)) 1) -}}
  {{- fail (printf "kvStore.enabled is true, and prefill has %d ranks, decode %d, whose KV differs; set kvStore.config.tp to that of the KV to keep" (first $ranks) (last $ranks)) -}}
{{- end -}}
{{- end -}}
